"""The coefficients that turn a device's datasheet into time."""

from dataclasses import dataclass, field, replace

from servecast.calibration.fabric import FabricFit
from servecast.costmodels.affine import StepConstants
from servecast.costmodels.efficiency import Efficiency
from servecast.costmodels.kernels import Kernels


@dataclass(frozen=True)
class Profile:
    """What calibration knows of a device and an engine.

    Attributes
    ----------
    efficiency : how far kernels stay below the datasheet
    host_step_s : scheduling, input preparation and output handling of one step, on the CPU.
        The default is the overhead a step published with the H100 fits of specdecode-bench,
        1.21 ms; vLLM 0.32 on a CPU, which has nothing to copy or launch, takes 0.70 ms
    host_sequence_s : the same, of each sequence in the step. The default is that of vLLM 0.32 on
        one core of an AMD EPYC (`servecast calibrate --device cpu --engine vllm`: null models, in
        which next to nothing else takes time)
    host_layer_s : launching one layer's kernels, without CUDA graphs; None: `efficiency` has it
    kernels : measured ones; the efficiency stands for what they do not cover
    steps : constants of whole steps, in place of everything else
    fabric : constants of an SRAM device, likewise
    """

    efficiency: Efficiency = field(default_factory=Efficiency)
    host_step_s: float = 1.21e-3
    host_sequence_s: float = 19.3e-6
    host_layer_s: float | None = None
    kernels: Kernels | None = None
    steps: StepConstants | None = None
    fabric: FabricFit | None = None

    def slower(self, factor: float) -> "Profile":
        """With every measured kernel taking `factor` times as long."""
        if self.kernels is None:
            return self
        return replace(self, kernels=replace(self.kernels, scale=factor * self.kernels.scale))

    @property
    def label(self) -> str:
        """What a report says of these figures."""
        if self.steps is not None:
            return self.steps.label
        if self.fabric is not None:
            return self.fabric.label
        return self.efficiency.label if self.kernels is None else self.kernels.label


#: Used for every device that has no measured profile.
GENERIC = Profile()
