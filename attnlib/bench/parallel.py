"""Speedup of several ranks over one, on sequences and caches sharded over GPUs or CPU processes."""

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

from .. import CAUSAL, FULL, KVLayout, attention, cached_attention
from ..parallel import gather_attention, head_attention, ring_attention, shard
from .cases import Case, plain
from .compare import APART, Cells, Failure, attempt, distance, in_turns
from .place import Target, cpu, cuda, wall_seconds
from .report import Line, Table
from .speed import Rows, Run
from .stored import Decoding, stored
from .watchdog import watched

FORMS = MappingProxyType({"ring": ring_attention, "gather": gather_attention, "heads": head_attention})
WHATS = MappingProxyType({"forward": "forward", "both": "forward + backward"})
ONE = "one rank"
# Each implementation is timed ROUNDS times, in turns; once if a call has more than LONG FLOPs (seconds).
ROUNDS, LONG = 9, 2e15
STEPS = 20  # decoding calls per measurement, which a GPU replays as one graph
Found = list[tuple[str, str, Cells]]  # each measurement: table name, row name, and cells

SEQUENCES = (
    plain(32768, 16, 128),
    *(
        Case(f"{name} {tokens // 1024}k", 1, *heads, tokens, *channels, CAUSAL)
        for tokens in (32768, 131072, 524288)
        for name, heads, channels in (
            ("GQA 32/8", (32, 8), (128, 128)),
            ("MLA 192/128", (16, 16), (192, 128)),
        )
    ),
)
CACHES = (Decoding("128 heads, 32 x 32k", 32, 128, 32768, KVLayout.latent(512, 64, dtype=torch.bfloat16)),)
SMALL_SEQUENCES = (plain(512, 4, 16)._replace(dtype=torch.float32),)
SMALL_CACHES = (Decoding("8 heads, 2 x 500", 2, 8, 500, KVLayout.latent(32, 8)),)


def counts(place: Target) -> list[int]:
    """Return the numbers of ranks to time: powers of two up to the number of GPUs, or 2 on a CPU.

    Raises:
        RuntimeError: there are fewer than two GPUs.
    """
    most = torch.cuda.device_count() if place.device == "cuda" else 2
    if most < 2:
        raise RuntimeError(
            f"--parallel: expected at least 2 GPUs, got {most}; without --gpu it runs on the CPU"
        )
    return [1 << power for power in range(1, most.bit_length())]


def rows(place: Target, tables: Sequence[Table], measure: Callable, work: Iterable[Case]) -> Rows:
    """Run ``measure(place, mesh, case)`` on each number of ranks, and yield the rows of all tables."""
    for ranks in counts(place):
        with TemporaryDirectory() as folder:
            try:
                mp.spawn(_process, (measure, place.device, tuple(work), ranks, folder), nprocs=ranks)
            except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
                raise RuntimeError(str(error).strip().splitlines()[-1]) from error
            found = json.loads(Path(folder, "rows.json").read_text())
        for table, (name, row, cells) in product(tables, found):
            if table.name == name:
                restored = {column: Failure(x) if isinstance(x, str) else x for column, x in cells.items()}
                yield table, Line(f"{ranks} ranks, {row}", restored)


def _process(
    rank: int, measure: Callable, device: str, work: Sequence[Case], ranks: int, folder: str
) -> None:
    """Run the measurements in one process (one rank); rank 0 writes the results."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    place, backend = (cuda(), "nccl") if device == "cuda" else (cpu(), "gloo")
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    mesh, found = init_device_mesh(device, (ranks,)), []
    for case in work:
        with watched(f"{case.name}, {ranks} ranks"):
            found += measure(place, mesh, case)
        place.tidy()
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _milliseconds(call: Callable, place: Target) -> float:
    """Time a call that all ranks start together; return the milliseconds of the slowest rank."""
    dist.barrier()
    return _most(wall_seconds(call, place.synchronize) * 1e3, place)


def _most(x: float, place: Target) -> float:
    found = torch.tensor([x], dtype=torch.float64, device=place.device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def _checked(run: object, results: Callable, expected: Sequence[Tensor], place: Target) -> object:
    """Return ``run``, or a Failure if any rank's results differ from those that one rank computes alone."""
    error = _most(distance(results(run), expected), place)
    return run if error < APART else Failure(f"differs from {ONE} by {error:.0e}")


def sequence(place: Target, mesh: DeviceMesh, case: Case) -> Found:
    """Time attention over one sequence: sharded by attnlib, sharded by torch, and whole on one rank."""
    torch.manual_seed(0)
    options, whole = {"mask": case.mask, "backend": place.backend}, case.tensors(place.device)
    own = [shard(x, mesh).clone() for x in whole]
    for x in (*whole[:3], *own[:3]):
        x.requires_grad_()
    one = Run(partial(attention, **options), tuple(whole[:3]), whole[3], False)
    expected = [shard(x, mesh).clone() for x in one.results()]
    runs = {
        x: Run(partial(call, mesh=mesh, **options), tuple(own[:3]), own[3], False)
        for x, call in FORMS.items()
    }
    right = {x: attempt(_checked, run, Run.results, expected, place) for x, run in runs.items()} | {ONE: one}
    taken = _by_what(right, place, case)
    theirs, found = attempt(_theirs, place, mesh, case, [x.detach() for x in whole], expected), []
    for what, label in WHATS.items():
        ours = {x: taken[what][x] for x in FORMS}
        peer = theirs if isinstance(theirs, Failure) else theirs[what]["torch"]
        for name, other in (("parallel", {ONE: taken[what][ONE]}), ("parallel-peers", {"torch": peer})):
            found.append((name, f"{case.name}, {label}", ours | other))
    return found


def _by_what(runs: dict, place: Target, case: Case) -> dict[str, Cells]:
    clock, rounds = partial(_milliseconds, place=place), ROUNDS if case.flops("both") < LONG else 1
    return {
        x: in_turns({name: attempt(Run.action, run, x) for name, run in runs.items()}, clock, rounds)
        for x in WHATS
    }


def _theirs(
    place: Target, mesh: DeviceMesh, case: Case, whole: Sequence[Tensor], expected: Sequence[Tensor]
) -> dict:
    """Time torch's context parallelism, which shards a sequence over ranks as attnlib does.

    It replaces torch's scaled_dot_product_attention while it is active.
    """
    from torch.distributed.tensor.experimental import context_parallel

    buffers = [x.transpose(1, 2).contiguous() for x in whole]
    options = {"is_causal": case.mask == CAUSAL, "enable_gqa": case.heads != case.kv_heads}
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * len(buffers)):
        *leaves, dout = (x.clone().requires_grad_() for x in buffers)
        run = Run(
            partial(functional.scaled_dot_product_attention, **options), tuple(leaves), dout.detach(), True
        )
        return _by_what({"torch": attempt(_checked, run, Run.results, expected, place)}, place, case)


@torch.no_grad()
def latents(place: Target, mesh: DeviceMesh, case: Decoding) -> Found:
    """Time MLA decoding with latents sharded over the ranks, copied to every rank, or on a single rank.

    With several ranks, each rank computes some of the query heads.
    """
    q, *keys = case.tensors(place.device)
    whole, sharded, heads = (
        stored(case, keys),
        stored(case, keys, mesh=mesh).with_own_heads(),
        case.heads // mesh.size(),
    )
    here = slice(mesh.get_local_rank() * heads, (mesh.get_local_rank() + 1) * heads)
    attend = partial(cached_attention, mask=FULL, backend=place.backend)
    own = q[:, :, here].contiguous()
    calls = {"sharded": partial(attend, own, sharded), "copied": partial(attend, own, whole)}
    expected = [attend(q, whole)[:, :, here]]
    right = {x: attempt(_checked, run, lambda run: [run()], expected, place) for x, run in calls.items()}
    several = place.capture or (lambda call, n: lambda: [call() for _ in range(n)])
    steps = {x: attempt(several, y, STEPS) for x, y in (right | {ONE: partial(attend, q, whole)}).items()}
    taken = in_turns(steps, partial(_milliseconds, place=place), ROUNDS)
    return [
        ("parallel-decode", case.name, {name: attempt(lambda x: x / STEPS, x) for name, x in taken.items()})
    ]
