"""Commands inside files: Kubernetes manifests, docker-compose files and vLLM's own --config."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from servecast.costmodels.catalogue import catalogue_name, hardware_names
from servecast.costmodels.errors import InputError
from servecast.costmodels.reading import read_lenient
from servecast.scenarios.serve import (
    IMAGE,
    VARIABLE,
    ServeLine,
    flags_of_config,
    parse_line,
    split_words,
    take_image,
    until_shell,
)
from servecast.scenarios.yamlfile import parse as parse_yaml

MAX_BYTES = 1_000_000

#: Node labels that name the device.
DEVICE_LABELS = (
    "cloud.google.com/gke-accelerator",
    "nvidia.com/gpu.product",
    "gpu.nvidia.com/model",
    "gpu.nvidia.com/class",
    "karpenter.k8s.aws/instance-gpu-name",
)

#: `${NAME:-default}` and kin, innermost first; `$(NAME)` is Kubernetes'.
DEFAULTED = re.compile(r"\$\{(\w+)(?::?-([^${}]*))?\}")
KUBERNETES = re.compile(r"\$\((\w+)\)")
PLAIN = re.compile(r"\$(\w+)")
MOST_ROUNDS = 20


@dataclass(frozen=True)
class Command:
    """A container that runs vLLM.

    Attributes
    ----------
    words : its command and arguments, variables filled in
    unset : variables that nothing sets
    """

    name: str
    words: tuple[str, ...]
    image: str
    env: Mapping[str, str] = field(default_factory=dict)
    replicas: int = 1
    hardware: str | None = None
    unset: tuple[str, ...] = ()


def line_of_file(path: Path, service: str | None = None) -> ServeLine:
    """The vLLM command of a manifest, a compose file or a --config file, taken apart.

    Parameters
    ----------
    service : which one, by the name of its container or service, where there are several

    Raises InputError for a file without such a command, or with several and no `service`.
    """
    text = read_lenient(path, MAX_BYTES)
    documents = list(_documents(text, str(path)))
    beside = _dotenv(path.parent / ".env")
    commands = [command for document in documents for command in _commands(document, beside)]
    if not commands:
        if any(isinstance(document, dict) and "workload" in document for document in documents):
            raise InputError(f"{path}: a scenario: give it in place of a line, without --from")
        if len(documents) == 1 and isinstance(documents[0], dict) and _is_config(documents[0]):
            return _line_of_config(text, path)
        raise InputError(f"{path}: no container runs vLLM in it, and it is no file of its flags")
    if service is not None:
        chosen = [command for command in commands if command.name == service]
        if not chosen:
            names = ", ".join(command.name for command in commands)
            raise InputError(f"{path}: no service {service!r}; it has {names}")
        commands = chosen
    if len({command.words for command in commands}) > 1:
        names = ", ".join(command.name for command in commands)
        raise InputError(f"{path}: several run vLLM ({names}): name one with --service")
    return _line_of_command(commands[0], path)


def _line_of_command(command: Command, path: Path) -> ServeLine:
    try:
        line = parse_line(command.words, path.parent, command.env)
    except InputError as error:
        unset = f" (not set in the file: {', '.join(command.unset)})" if command.unset else ""
        raise InputError(f"{path}: {command.name}: {error}{unset}") from None
    line.replicas *= command.replicas
    line.hardware = command.hardware
    image = IMAGE.match(command.image)
    take_image(line, image[1] if image else None)
    return line


def _line_of_config(text: str, path: Path) -> ServeLine:
    given = flags_of_config(text, str(path))
    if not given.get("model"):
        raise InputError(f"{path}: no model in it: use `vllm serve MODEL --config {path.name}`")
    return parse_line([str(given["model"]), "--config", path.name], path.parent)


def _documents(text: str, where: str) -> Iterator[Any]:
    """The documents of a YAML stream, each through the strict reader."""
    first = 0
    for part in re.split(r"(?m)^---.*$", text):
        at = first
        first += part.count("\n")
        if any(line.strip() and not line.lstrip().startswith("#") for line in part.splitlines()):
            yield parse_yaml(part, lambda line, at=at: f"{where}:{line + at}").value  # type: ignore[misc]


def _dotenv(path: Path) -> dict[str, str]:
    """The variables that compose fills in from beside its file, if it has any there."""
    if not path.is_file():
        return {}
    text = read_lenient(path, MAX_BYTES)
    lines = (line.strip().removeprefix("export ") for line in text.splitlines())
    pairs = (line.partition("=") for line in lines if "=" in line and not line.startswith("#"))
    return {name.strip(): value.strip().strip("'\"") for name, _, value in pairs}


def _is_config(document: dict[str, Any]) -> bool:
    from servecast.scenarios import flags

    if isinstance(document.get("model"), dict):
        return False
    names = [flags.canonical(str(key)).removeprefix("no_") for key in document]
    return any(name in flags.MAPPED or name in flags.READ for name in names)


def _commands(document: Any, beside: Mapping[str, str]) -> Iterator[Command]:
    """Containers of a Kubernetes object, however deep, or services of a compose file."""
    if not isinstance(document, dict):
        return
    services = document.get("services")
    if isinstance(services, dict):
        for name, service in services.items():
            if isinstance(service, dict):
                yield from _service(str(name), service, beside)
        return
    for spec, replicas in _pod_specs(document, 1):
        containers = spec.get("containers")
        for container in containers if isinstance(containers, list) else ():
            if isinstance(container, dict):
                yield from _container(container, spec, replicas)


def _pod_specs(node: Any, replicas: int) -> Iterator[tuple[dict[str, Any], int]]:
    if isinstance(node, dict):
        stated = node.get("replicas")
        if isinstance(stated, int) and not isinstance(stated, bool) and stated >= 1:
            replicas = stated
        if isinstance(node.get("containers"), list):
            yield node, replicas
            return
        for value in node.values():
            yield from _pod_specs(value, replicas)
    elif isinstance(node, list):
        for value in node:
            yield from _pod_specs(value, replicas)


def _container(container: dict[str, Any], spec: dict[str, Any], replicas: int) -> Iterator[Command]:
    env = _env(container.get("env"))
    words = [*_words(container.get("command")), *_words(container.get("args"))]
    yield from _command(
        str(container.get("name", "container")),
        words,
        str(container.get("image", "")),
        env,
        replicas,
        _device(spec.get("nodeSelector")),
    )


def _service(name: str, service: dict[str, Any], beside: Mapping[str, str]) -> Iterator[Command]:
    own = _env(service.get("environment"))
    own = {key: _filled(value, beside)[0] for key, value in own.items()}
    env = {**beside, **own}
    words = [*_words(service.get("entrypoint")), *_words(service.get("command"))]
    deploy = service.get("deploy")
    replicas = deploy.get("replicas", 1) if isinstance(deploy, dict) else 1
    replicas = replicas if isinstance(replicas, int) and replicas >= 1 else 1
    image, _ = _filled(str(service.get("image", "")), env)
    yield from _command(name, words, image, env, replicas, None)


def _command(
    name: str,
    words: list[str],
    image: str,
    env: dict[str, str],
    replicas: int,
    hardware: str | None,
) -> Iterator[Command]:
    """A Command if the words or the image are vLLM's."""
    words, exported = _of_shell(words)
    env = {**env, **{key: _filled(value, env)[0] for key, value in exported.items()}}
    runs = any(re.search(r"(^|/)vllm$|vllm\.entrypoints", word) for word in words)
    # A container without words (a worker that waits for its leader) starts no server.
    if not runs and ("vllm" not in image or not words):
        return
    filled = [_filled(word, env) for word in words]
    unset = sorted({name for _, names in filled for name in names})
    words = [word for word, _ in filled if word]
    yield Command(name, tuple(words), image, env, replicas, hardware, tuple(unset))


def _words(value: Any) -> list[str]:
    """A list of words, or a text that a shell would split."""
    if isinstance(value, list):
        return [_text(word) for word in value if not isinstance(word, dict | list)]
    if isinstance(value, str):
        return split_words(value)
    return []


def _text(value: Any) -> str:
    return (
        {True: "true", False: "false", None: ""}.get(value, str(value))
        if not isinstance(value, str)
        else value
    )


def _of_shell(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """`sh -c "... vllm serve ..."`: the words of the vLLM command alone, and the variables that
    are set before it."""
    if len(words) >= 3 and re.search(r"(^|/)(ba|da|z)?sh$", words[0]) and words[1].startswith("-"):
        words = split_words(" ".join(words[2:]))
    for start, word in enumerate(words):
        if re.search(r"(^|/)vllm$|vllm\.entrypoints", word):
            before = (VARIABLE.match(word) for word in words[:start])
            exported = {found[1]: found[2].removesuffix(";") for found in before if found}
            return list(until_shell(words[start:])), exported
    return words, {}


def _env(value: Any) -> dict[str, str]:
    """Variables as Kubernetes or compose writes them; those from secrets are left out."""
    found: dict[str, str] = {}
    if isinstance(value, dict):
        found = {str(key): _text(text) for key, text in value.items() if text is not None}
    for entry in value if isinstance(value, list) else ():
        if isinstance(entry, dict) and "value" in entry:
            found[str(entry.get("name"))] = _text(entry["value"])
        elif isinstance(entry, str) and "=" in entry:
            key, _, text = entry.partition("=")
            found[key] = text
    return found


def _filled(text: str, env: Mapping[str, str]) -> tuple[str, list[str]]:
    """`$(A)`, `${A:-b}` and `$A` replaced, innermost first; (text, names that nothing sets)."""
    unset: list[str] = []

    def value(match: re.Match[str]) -> str:
        name = match[1]
        default = match[2] if match.re is DEFAULTED else None
        found = env.get(name)
        if found is not None and match.group(0) not in found:
            return found
        if default is not None:
            return default
        unset.append(name)
        return ""

    for _ in range(MOST_ROUNDS):
        before = text
        for pattern in (DEFAULTED, KUBERNETES):
            text = pattern.sub(value, text)
        if text == before or len(text) > MAX_BYTES:
            break
    return PLAIN.sub(value, text), unset


def _device(selector: Any) -> str | None:
    """The device of a node selector, if the catalogue has it."""
    if not isinstance(selector, dict):
        return None
    for label in DEVICE_LABELS:
        name = catalogue_name(str(selector.get(label, "")))
        if name in hardware_names():
            return name
    return None
