"""vLLM commands out of Kubernetes manifests, compose files and config files."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servecast.costmodels.errors import InputError
from servecast.scenarios.manifests import line_of_file

FILES = Path(__file__).parents[1].parent / "shared/validation/files"

DEPLOYMENT = """
apiVersion: v1
kind: Service
---
apiVersion: apps/v1
kind: Deployment
spec:
  replicas: 3
  template:
    spec:
      nodeSelector: {nvidia.com/gpu.product: NVIDIA-L40S}
      containers:
      - name: server
        image: vllm/vllm-openai:v0.19.0
        command: ["/bin/sh", "-c"]
        args:
        - |
          set -e; export A=1
          vllm serve $(MODEL) --max-num-seqs ${SEQS} \\
            --max-model-len 4096 > /tmp/log 2>&1 && echo done
        env:
        - {name: MODEL, value: Qwen/Qwen3-8B}
        - {name: SEQS, value: "32"}
        - name: TOKEN
          valueFrom: {secretKeyRef: {name: s, key: k}}
      - name: sidecar
        image: busybox
"""

COMPOSE = """
services:
  redis: {image: redis}
  small:
    image: ${IMAGE:-vllm/vllm-openai:v0.21.0}
    environment: [LEN=2048, VLLM_USE_V1=1]
    command: --model Qwen/Qwen3-0.6B --max-model-len ${LEN} --max-num-seqs ${SEQS:-${N:-8}}
  large:
    image: vllm/vllm-openai:latest
    command: [--model, Qwen/Qwen3-8B, --tensor-parallel-size, "${TP:-2}", --port, 8000]
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "file.yaml"
    path.write_text(text)
    return path


def test_a_deployment(tmp_path: Path) -> None:
    line = line_of_file(write(tmp_path, DEPLOYMENT))
    assert (line.model, line.replicas, line.hardware) == ("Qwen/Qwen3-8B", 3, "l40s")
    assert line.engine == {"max_num_seqs": 32, "max_model_len": 4096, "vllm_version": "0.19.0"}


def test_compose_services_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, COMPOSE)
    small = line_of_file(path, "small")
    assert small.engine == {
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "vllm_use_v1": True,
        "vllm_version": "0.21.0",
    }
    assert line_of_file(path, "large").engine == {"tensor_parallel_size": 2}
    with pytest.raises(InputError, match=r"several run vLLM \(small, large\): name one"):
        line_of_file(path)
    with pytest.raises(InputError, match="no service 'none'; it has small, large"):
        line_of_file(path, "none")


def test_variables_from_beside_a_compose_file(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("# ours\nexport SEQS='12'\nMORE=\n")
    text = 'services: {x: {image: vllm/y, command: "--model M --max-num-seqs ${SEQS} $MORE"}}\n'
    assert line_of_file(write(tmp_path, text)).engine == {"max_num_seqs": 12}


def test_variables_that_the_shell_sets_before(tmp_path: Path) -> None:
    text = """
    spec:
      containers:
      - name: a
        image: vllm/vllm-openai
        command: [bash, -lc]
        args: ["export MODEL=Qwen/Qwen3-8B; VLLM_USE_V1=0 vllm serve $MODEL --max-num-seqs 4"]
    """
    line = line_of_file(write(tmp_path, text))
    assert line.model == "Qwen/Qwen3-8B"
    assert line.engine == {"max_num_seqs": 4, "vllm_use_v1": False}


def test_a_worker_without_words_waits_for_its_leader(tmp_path: Path) -> None:
    text = """
    spec:
      leaderWorkerTemplate:
        leaderTemplate:
          spec: {containers: [{name: leader, image: vllm/a, args: [--model, M, "${EXTRA:-}"]}]}
        workerTemplate: {spec: {containers: [{name: worker, image: vllm/a}]}}
    """
    assert line_of_file(write(tmp_path, text)).model == "M"


def test_a_config_file_with_a_model(tmp_path: Path) -> None:
    line = line_of_file(write(tmp_path, "model: Qwen/Qwen3-8B\nmax-num-seqs: 4\n"))
    assert (line.model, line.engine) == ("Qwen/Qwen3-8B", {"max_num_seqs": 4})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-num-seqs: 4\n", "no model in it: use `vllm serve MODEL --config file.yaml`"),
        ("a: 1\n", "no container runs vLLM in it"),
        ("model: M\nengine: {}\nworkload: {}\n", "a scenario: give it in place of a line"),
        ("a: [1\n", "file.yaml"),
        (
            'services: {x: {image: vllm/y, command: "--model ${NONE}"}}\n',
            r"x: vllm serve: --model needs a value \(not set in the file: NONE\)",
        ),
        (
            'services: {x: {image: vllm/y, command: "--model a/b --max-num-seqs ${N}"}}\n',
            r"x: vllm serve: .*\(not set in the file: N\)",
        ),
    ],
)
def test_files_that_do_not_help(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        line_of_file(write(tmp_path, text))


@pytest.mark.skipif(not FILES.exists(), reason="shared files not here")
def test_real_files() -> None:
    gke = line_of_file(FILES / "k8s/vllm_manifest_base.yaml")
    assert gke.hardware == "h100-sxm"
    assert gke.engine["vllm_version"] == "0.11.0"
    assert gke.engine["max_num_seqs"] == 128
    old = line_of_file(FILES / "k8s/vllm_manifest_v0_env.yaml")
    assert old.engine["vllm_use_v1"] is False
    assert "VLLM_USE_V1=0" in dict(old.unmodelled)
    compose = line_of_file(FILES / "compose/club3090_1.yml")
    assert compose.engine["max_model_len"] == 8192
    assert compose.engine["gpu_memory_utilization"] == 0.92
    assert compose.engine["language_model_only"] is True


@given(
    st.one_of(
        st.text(),
        st.binary().map(lambda raw: raw.decode("utf-8", "replace")),
        st.tuples(
            st.integers(0, len(DEPLOYMENT)),
            st.text(max_size=5),
            st.sampled_from((DEPLOYMENT, COMPOSE)),
        ).map(lambda cut: cut[2][: cut[0]] + cut[1] + cut[2][cut[0] :]),
    )
)
def test_any_file_is_read_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.mktemp("m") / "file.yaml"
    path.write_text(text, encoding="utf-8", errors="replace")
    try:
        line_of_file(path)
    except InputError as error:
        assert "\n" not in str(error) or str(error)
