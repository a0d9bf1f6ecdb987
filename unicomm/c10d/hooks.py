"""Communication hooks for DistributedDataParallel and FSDP2 that send gradients in a wire format.

    state = unicomm.c10d.hooks.compressed(wire="mxfp8")
    model.register_comm_hook(state, unicomm.c10d.hooks.reduce_compressed)     # DistributedDataParallel
    state.attach(model)                                                     # FSDP2: after fully_shard

On unicomm's groups of CPU tensors the operation has the wire format itself, so that hosts reduce in memory
first. On all other groups the same steps run on torch.distributed's all_to_all_single.

With error feedback a rank remembers what its encodings lost, and adds it to the next gradients (Seide et al.,
1-Bit Stochastic Gradient Descent, Interspeech 2014; Karimireddy et al., Error Feedback Fixes SignSGD, ICML
2019). Whatever is encoded on the way counts, also partial sums of a host and the sums that come back (Tang et
al., DoubleSqueeze, ICML 2019); its loss is remembered by the rank that encoded it.
"""

# torch compares the annotations of hooks, so they cannot be texts.
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from unicomm.comms.errors import InvalidArgumentError
from unicomm.comms.execution.composed import encoded
from unicomm.comms.execution.composed.exchanges import AtOnce, Traffic
from unicomm.comms.operations import wire as wires
from unicomm.comms.operations.reduction import RedOpType, ReduceOp
from unicomm.comms.options import read_hints

from .process_group import UnicommProcessGroup, reduce_op
from .process_group_work import ProcessGroupWork

Tensor = torch.Tensor
_VERSION = 1  # of a state_dict
_AVG = ReduceOp(RedOpType.AVG)


class Compressed:
    """What a compressing hook knows: format, group, and what was lost. `compressed` makes it."""

    def __init__(
        self,
        hints: Mapping[str, str],
        error_feedback: bool,
        group: dist.ProcessGroup | None,
    ) -> None:
        asked = wires.asked_for(hints)
        if asked is None:
            raise InvalidArgumentError("wire='plain' compresses nothing", hint="leave the hook out")
        self.error_feedback = error_feedback
        self._hints, self._asked, self._group = dict(hints), asked, group
        self._steps = 0
        # Of DistributedDataParallel: parameters by id with their number, in order of their appearance; what
        # was lost of each; and the buffers that hold that, by the numbers of a bucket's parameters.
        self._parameters: dict[int, tuple[int, Tensor]] = {}
        self._lost: dict[str, Tensor] = {}
        self._buckets: dict[tuple[int, ...], Tensor] = {}
        self._loaded: dict[str, Tensor] = {}

    # --- gradients ---------------------------------------------------------------------------------------

    def reduce_bucket(self, bucket: Any) -> torch.futures.Future[Any]:
        """Averages a bucket of DistributedDataParallel over the group. Returns a future of its tensor."""
        buffer = bucket.buffer()
        group = self._group if self._group is not None else dist.group.WORLD
        assert group is not None
        lost = self._lost_of_bucket(bucket.parameters(), buffer) if self._keeps(buffer) else None
        if (work := self._by_communicator(group, "all_reduce", (buffer,), _AVG, lost)) is not None:
            return work.get_future().then(lambda future: future.value()[0])
        self._all_reduce(group, buffer, lost)
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(buffer)
        return done

    def reduce_scatter(
        self, name: str, output: Tensor, input: Tensor, group: dist.ProcessGroup, op: ReduceOp
    ) -> dist.Work | None:
        """Reduces `input` over the group into the parts that the ranks' `output` are. `name`: of the input,
        the same in each step."""
        lost = self._lost_of(name, input) if self._keeps(input) else None
        work = self._by_communicator(group, "reduce_scatter_single", (output, input), op, lost)
        if work is not None:
            return work
        self._reduce_scatter(group, output, input, op, lost)
        return None

    def attach(self, model: torch.nn.Module) -> None:
        """Compresses the reduce-scatters of all modules of `model` that `fully_shard` has sharded.

        Raises `InvalidArgumentError` if there is none.
        """
        found = [(name, part) for name, part in model.named_modules() if isinstance(part, FSDPModule)]
        if not found:
            raise InvalidArgumentError("fully_shard has sharded no part of the model", hint="shard it first")
        for name, part in found:
            part.set_custom_reduce_scatter(_ReduceScatter(self, f"module {name}"))  # type: ignore[arg-type]

    # --- checkpoints -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What this rank has lost so far. Each rank saves its own.

        A rank may load only its own, in a job of the same ranks on the same hosts; other jobs begin without.
        """
        lost = {**self._loaded, **self._lost}
        return {
            "version": _VERSION,
            "wire": self._asked.format.text,
            "steps": self._steps,
            "lost": {name: tensor.clone() for name, tensor in lost.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state_dict`. Called before the first backward pass.

        Raises `InvalidArgumentError` if it is not one.
        """
        try:
            if state["version"] != _VERSION:
                raise ValueError(f"version {state['version']}")
            loaded = {str(name): tensor.detach().float().clone() for name, tensor in state["lost"].items()}
            steps = int(state["steps"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidArgumentError(
                f"this is no state of a compressing hook ({error!r})", hint="pass what state_dict() returned"
            ) from None
        self._loaded, self._steps = loaded, steps
        self._lost, self._buckets = {}, {}

    def _keeps(self, tensor: Tensor) -> bool:
        return self.error_feedback and tensor.dtype in wires.DTYPES

    def _lost_of(self, name: str, like: Tensor) -> Tensor:
        """Returns what was lost of the tensor `name`, one float32 an element of `like`."""
        lost = self._lost.get(name)
        if lost is None:
            lost = self._loaded.pop(name, None)
            if lost is None:
                lost = torch.zeros(like.numel(), dtype=torch.float32)
            self._lost[name] = lost = lost.flatten().to(like.device)
        if lost.numel() != like.numel():
            raise InvalidArgumentError(
                f"{name} has {like.numel()} elements, and the loaded state has {lost.numel()} for it",
                hint="load the state that this rank saved with this model, or none",
            )
        return lost

    def _lost_of_bucket(self, parameters: Sequence[Tensor], buffer: Tensor) -> Tensor:
        """Returns what was lost of a bucket's gradients. DistributedDataParallel may rebuild its buckets."""
        numbers = []
        for parameter in parameters:
            entry = self._parameters.setdefault(id(parameter), (len(self._parameters), parameter))
            numbers.append(entry[0])
        key = tuple(numbers)
        if (whole := self._buckets.get(key)) is not None:
            return whole
        whole = torch.zeros(buffer.numel(), dtype=torch.float32, device=buffer.device)
        at = 0
        for number, parameter in zip(numbers, parameters, strict=True):
            part = whole[at:][: parameter.numel()]
            part.copy_(self._lost_of(f"parameter {number}", parameter))
            self._lost[f"parameter {number}"] = part
            at += parameter.numel()
        self._buckets = {k: v for k, v in self._buckets.items() if not set(k) & set(key)}
        self._buckets[key] = whole
        return whole

    # --- operations --------------------------------------------------------------------------------------

    def _by_communicator(
        self,
        group: dist.ProcessGroup,
        name: str,
        tensors: tuple[Tensor, ...],
        op: ReduceOp,
        lost: Tensor | None,
    ) -> ProcessGroupWork | None:
        """Runs an operation whose elements have the wire format; None if the group cannot."""
        if not isinstance(group, UnicommProcessGroup) or tensors[0].device.type != "cpu":
            return None
        hints = self._hints if tensors[0].dtype in wires.DTYPES else None
        engine = group.get_comm("cpu")._engine
        work = engine.collective(name, tensors, True, hints, None, op=op, residual=lost)
        return ProcessGroupWork([work], [tensors[0]])

    def _codec(self, tensor: Tensor, group: dist.ProcessGroup, lost: Tensor | None) -> encoded.Codec:
        self._steps += 1
        wire = wires.Wire(self._asked, residual=lost)
        return encoded.Codec(wire, tensor.dtype, dist.get_rank(group), self._steps)

    def _all_reduce(self, group: dist.ProcessGroup, buffer: Tensor, lost: Tensor | None) -> None:
        size = dist.get_world_size(group)

        def plain() -> None:
            dist.all_reduce(buffer, group=group)
            buffer.div_(size)

        if size == 1 or buffer.dtype not in wires.DTYPES:
            plain()
            return
        codec = self._codec(buffer, group, lost)
        encoded.all_reduce(codec, buffer, _AVG, dist.get_rank(group), size, _traffic_in(group), plain)

    def _reduce_scatter(
        self,
        group: dist.ProcessGroup,
        output: Tensor,
        input: Tensor,
        op: ReduceOp,
        lost: Tensor | None,
    ) -> None:
        codec, size = self._codec(input, group, lost), dist.get_world_size(group)
        parts = input.view(-1).chunk(size)
        rests = encoded.residuals(codec.wire, parts)
        codec.reduce_scatter(parts, dist.get_rank(group), output.view(-1), _traffic_in(group), op, rests)


def compressed(
    wire: str = "mxfp8",
    *,
    error_feedback: bool = True,
    rounding: str = "nearest",
    group: dist.ProcessGroup | None = None,
) -> Compressed:
    """Returns the state of a hook that sends gradients in a wire format.

    Args:
        wire: "bfloat16", "float8_e4m3fn", "int8" or "mxfp8".
        error_feedback: remember what is lost, and add it to the next gradients. Takes one float32 for each
            element of the gradients.
        rounding: "nearest", "stochastic" or "stochastic:SEED".
        group: of the DistributedDataParallel model; None means the default group. FSDP2 names its own.

    Raises `InvalidArgumentError` for other values.
    """
    hints = {wires.NAME: wire, wires.ROUNDING: rounding}
    read_hints({**hints, "reduction": "ordinary"}, (), "unicomm")
    return Compressed(hints, error_feedback, group)


def reduce_compressed(
    state: Compressed,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """The hook for `DistributedDataParallel.register_comm_hook`, with the state that `compressed` returns.

    Gradients of other types than float32, float16 and bfloat16 are averaged as they are.
    """
    return state.reduce_bucket(bucket)


class _ReduceScatter:
    """The reduce-scatter of one module's gradients, with the methods of FSDP2's `ReduceScatter`."""

    def __init__(self, state: Compressed, name: str) -> None:
        self._state, self._name = state, name

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        reduction = reduce_op(op if hasattr(op, "op") else dist.ReduceOp(op))
        if input_tensor.dtype not in wires.DTYPES:
            plain: dist.Work | None = dist.reduce_scatter_tensor(
                output_tensor, input_tensor, op, group, async_op
            )
            return plain
        work = self._state.reduce_scatter(self._name, output_tensor, input_tensor, group, reduction)
        if work is not None and not async_op:
            work.wait()
            return None
        return work


def _traffic_in(group: dist.ProcessGroup) -> Traffic:
    def swap(ins: list[Tensor], outs: list[Tensor]) -> None:
        sizes = [[part.numel() for part in parts] for parts in (ins, outs)]
        got = torch.empty(sum(sizes[1]), dtype=torch.uint8, device=outs[0].device)
        dist.all_to_all_single(got, torch.cat(ins), sizes[1], sizes[0], group=group)
        for part, data in zip(outs, torch.split(got, sizes[1]), strict=True):
            part.copy_(data)

    return AtOnce(swap)
