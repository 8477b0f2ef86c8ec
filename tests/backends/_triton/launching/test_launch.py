"""How a kernel is launched: by names, directly with a Triton that is known, and as anybody would with every
other.
"""

from contextlib import contextmanager
from functools import lru_cache
from types import SimpleNamespace
from weakref import ref

import pytest
import torch
from probing import forgotten

from attnlib.backends._triton.functions.programs import tables
from attnlib.backends._triton.launching import direct
from attnlib.backends._triton.launching import launch as launch_store
from attnlib.backends._triton.launching.config import LaunchConfig
from attnlib.backends._triton.launching.launch import Block, Launch, cached_plan
from attnlib.backends._triton.launching.replay import Replay, blank
from attnlib.internal import probes

pytest.importorskip("triton")
from triton import knobs
from triton.runtime import driver


def named(q, k, out=None):
    """What a launch is given: in another order than the kernel's, and more."""
    return {"size": 0, "key": k, "query": q, "out": out}


class Ran:
    """Triton's launcher of a kernel, which gives what it is started with to a function."""

    def __init__(self, run):
        self.run = run

    def __call__(
        self, gridX, gridY, gridZ, stream, function, kernel_metadata, launch_metadata, launch_enter_hook,
        launch_exit_hook, *args,
    ):  # fmt: skip
        hooks = kernel_metadata, launch_metadata, launch_enter_hook, launch_exit_hook
        self.run(gridX, gridY, gridZ, stream, function, *hooks, *args)


class Kernel:
    """A kernel that writes down how it is launched, and what is run of it later."""

    arg_names = ("query_ptr", "key_ptr", "out_ptr", "key_desc", "size", "BLOCK_M")

    def __init__(self):
        self.launched, self.ran, self.devices = [], [], []

    def __getitem__(self, programs):
        def launch(*arguments, **options):
            self.launched.append((programs, arguments, options))
            self.devices.append(direct.streams().current_device())
            return SimpleNamespace(run=Ran(self.run), function=7, packed_metadata="metadata")

        return launch

    def run(self, *given):
        self.ran.append(given)
        self.devices.append(direct.streams().current_device())


@pytest.fixture
def kernel(monkeypatch):
    """A kernel that may be launched directly, on tensors of a CPU."""
    with forgotten():
        probes.ANSWERS[direct.STREAMS] = direct.Streams(lambda: -1, lambda device: 99)
        probes.ANSWERS[direct.DIRECT] = direct.Direct(plain=True, described=True)
        yield Kernel()


def made(kernel, blocks=None, programs=3):
    return Launch(kernel, programs, {"size": 5, "other": 1}, LaunchConfig(16, 32, 2, 4), blocks)


def test_tensors_are_taken_by_name_and_then_by_address(kernel):
    launch, (q, k, out) = made(kernel), torch.zeros(3, 8).unbind()
    for _ in range(2):
        launch.on(named(q, k, out))
    assert kernel.launched == [
        (
            (3,),
            (q, k, out, None, 5, 16),
            {"num_warps": 4, "num_stages": 2, "maxnreg": None, "enable_fp_fusion": True},
        )
    ]
    addresses = (q.data_ptr(), k.data_ptr(), out.data_ptr())
    assert kernel.ran == [(3, 1, 1, 99, 7, "metadata", None, None, None, *addresses, None, 5, 16)]


def test_a_triton_that_failed_its_trial_launches_every_time(kernel):
    probes.ANSWERS[direct.DIRECT] = direct.Direct(plain=False, described=False)
    launch, (q, k, out) = made(kernel), torch.zeros(3, 8).unbind()
    for _ in range(3):
        launch.on(named(q, k, out))
        assert not Replay([launch], named(q, k), "query", "out").on((q.data_ptr(), out.data_ptr()))
    assert len(kernel.launched) == 3
    assert not kernel.ran


class OnGPU:
    """A tensor of the second GPU, as far as launches look at one."""

    is_cuda, device = True, torch.device("cuda", 1)

    def data_ptr(self):
        return 160

    def get_device(self):
        return 1


def test_a_launch_goes_to_the_device_of_its_tensors(kernel, monkeypatch):
    current, launch, x = [0], made(kernel), OnGPU()

    @contextmanager
    def device(number):
        current.append(number)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    probes.ANSWERS[direct.STREAMS] = direct.Streams(lambda: current[-1], lambda device: 90 + device)
    repeated, given = Replay([launch], named(x, x, x), "out"), named(x, x, x)
    for current[0] in (0, 1, 0):
        launch.on(given)
        assert repeated.on((160,)) == (current[0] == 1)
    assert kernel.devices == [1] * 4  # where it is compiled, and then run
    assert [ran[3] for ran in kernel.ran] == [91] * 3
    assert current == [0]


class OlderLauncher:
    """Triton's launcher as it is up to 3.6, which hands on all but the grid, the stream and the function."""

    launch, launch_cooperative_grid, launch_pdl = object(), False, True

    def __init__(self, scratch=0):
        self.global_scratch_size, self.profile_scratch_size = scratch, 0

    def __call__(self, gridX, gridY, gridZ, stream, function, *args):
        pass


class Launcher(OlderLauncher):
    """As it is from 3.7 on."""

    def __call__(
        self, gridX, gridY, gridZ, stream, function, kernel_metadata, launch_metadata, launch_enter_hook,
        launch_exit_hook, *args,
    ):  # fmt: skip
        pass


def binary_of(run):
    return SimpleNamespace(run=run, function=7, packed_metadata="metadata")


@pytest.mark.parametrize(
    ("kind", "scratch", "is_quick"),
    [(OlderLauncher, 0, True), (OlderLauncher, 8, False), (Launcher, 0, False)],
)
def test_an_older_launcher_is_skipped_but_where_it_has_work(kind, scratch, is_quick):
    """What it would hand on: the cooperative grid and PDL, no scratch, then what it was given."""
    run = kind(scratch)
    start, constants, described = direct.starting(binary_of(run), [])
    given = (7, "metadata", None, None, None)
    assert start is (run.launch if is_quick else run)
    assert constants == ((7, False, True, None, None, *given[1:]) if is_quick else given)
    assert described == []


def reordered(gridX, gridY, gridZ, function, stream, *args):
    pass


def longer(gridX, gridY, gridZ, stream, function, cluster, *args):
    pass


def without_more(gridX, gridY, gridZ, stream, function):
    pass


@pytest.mark.parametrize("run", [reordered, longer, without_more])
def test_a_launcher_with_other_arguments_is_not_started(run):
    with pytest.raises(TypeError, match="takes unknown arguments"):
        direct.starting(binary_of(run), [])


def test_whatever_a_trial_raises_launches_go_through_triton(kernel):
    def attempt(descriptors):
        raise {False: ZeroDivisionError("of another version"), True: AssertionError}[descriptors]

    del probes.ANSWERS[direct.DIRECT]
    assert direct.direct(attempt) == direct.Direct(False, False, direct.direct(attempt).failures)
    assert (
        direct.direct(attempt)
        .failures[0]
        .startswith("direct launches: ZeroDivisionError: of another version; ")
    )
    launch, (q, k, out) = made(kernel), torch.zeros(3, 8).unbind()
    for _ in range(3):
        launch.on(named(q, k, out))
    assert len(kernel.launched) == 3


@pytest.mark.parametrize("arch", [80, 90])
def test_descriptors_have_a_trial_of_their_own(kernel, arch, monkeypatch):
    tried = []

    def attempt(descriptors):
        tried.append(descriptors)
        if descriptors:
            raise RuntimeError("other bits")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (arch // 10, arch % 10))
    del probes.ANSWERS[direct.DIRECT]
    found = direct.direct(attempt)
    assert (found.plain, found.described, tried) == (True, arch < 90, [False, True][: 1 + (arch >= 90)])


FORM = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 4, 1, 16]}


@pytest.mark.parametrize(
    ("kind", "forms"), [(OlderLauncher, [FORM]), (OlderLauncher, [None]), (Launcher, [FORM])]
)
def test_a_descriptor_is_made_once_for_an_address(kind, forms, monkeypatch):
    """As the chip takes it, where Triton's launcher would make that; else as Triton does."""

    def made_by_triton(launcher, tensordesc_meta):
        return lambda *given: (launcher, tensordesc_meta)

    filled = []
    fill = SimpleNamespace(fill_tma_descriptor=lambda *given: filled.append(given) or f"map {given[0]}")
    monkeypatch.setattr(type(driver), "active", SimpleNamespace(utils=fill))
    in_c, x, run = object(), torch.zeros(2, 8, 1, 16, dtype=torch.float16), kind()
    run.launch = made_by_triton(in_c, forms)
    first = Block("key", 4, 16).descriptor(x)
    start, _, [absent, (descriptors, sizes)] = direct.starting(binary_of(run), [None, first])
    assert absent[1] == []
    if kind is OlderLauncher and None not in forms:
        assert start is in_c
        assert [descriptors[at] for at in (160, 320, 160)] == ["map 160", "map 320", "map 160"]
        assert filled == [
            (at, 3, 2, 9, [1, 4, 1, 16], [2, 8, 1, 16], [128, 16, 16, 1], 0) for at in (160, 320)
        ]
        assert sizes == [2, 8, 1, 16, 128, 16, 16, 1]
    else:
        assert start is (run.launch if kind is OlderLauncher else run)
        assert descriptors[160].base.data_ptr() == 160
        assert descriptors[160] is descriptors[160] is not descriptors[320]
        assert {**vars(descriptors[160]), "base": x} == vars(first)
        assert sizes == []


def test_descriptors_are_kept_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(direct, "MOST", 2)
    found = direct.Descriptors(lambda address: [address])
    assert [found[n] for n in (1, 2, 3, 1)] == [[1], [2], [3], [1]]
    assert len(found) <= 2


def test_a_profiler_sees_every_launch(kernel, monkeypatch):
    launch, (q, k, out) = made(kernel), torch.zeros(3, 8).unbind()
    launch.on(named(q, k, out))
    monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [lambda metadata: None])
    launch.on(named(q, k, out))
    assert len(kernel.launched) == 2


def test_other_alignments_and_absent_tensors_are_compiled_apart(kernel):
    launch, x = made(kernel), torch.zeros(64)
    for q, k in ((x, x), (x[1:], x), (x, x[1:]), (x, None), (x[1:], x), (x, x)):
        launch.on(named(q, k, x))
    assert len(kernel.launched) == 3  # an absent tensor is aligned: shapes and presence belong to the plan
    assert len(kernel.ran) == 3


def test_what_functions_read_is_handed_on(kernel):
    """Other tensors of the same form are; Triton is asked where it would compile anew."""
    kernel.arg_names = ("query_ptr", "mask_tensors", "size")
    launch, x, y = made(kernel), torch.zeros(3, 8), torch.zeros(40, 8)
    reads = [
        tables(tensors)
        for tensors in (
            (x,),
            (y,),
            (y.int(),),
            (y[:1],),
            (y[:, 1:],),
            (y[:16],),
            (x, y),
            (y[:5], x),
            (None,),
            (),
        )
    ]
    asked = []
    for read in (*reads, *reads):
        launch.on({"query": x, "mask_tensors": read})
        asked.append(len(kernel.launched))
    assert asked == [1, 1, 2, 3, 4, 5, 6, 6, 7, 8, *[8] * 10]
    assert kernel.ran[0][-2:] == (reads[1], 5)
    assert [given[-2] for given in kernel.ran[-10:]] == reads
    kept = ref(x), ref(y)
    del x, y, reads, read  # else nobody keeps them
    kernel.launched.clear()
    kernel.ran.clear()
    assert [x() for x in kept] == [None, None]


def test_what_is_repeated_takes_the_rest(kernel):
    launch, (q, k, out, other) = made(kernel), torch.zeros(4, 8).unbind()
    call = Replay([launch, launch], named(q, k), "query", "nobody", "out")
    assert not call.on((q.data_ptr(), 0, out.data_ptr()))  # which has never been launched
    launch.on(named(q, k, out))
    assert call.on((other.data_ptr(), 5 * 16, out.data_ptr()))
    assert [x[1][:3] for x in kernel.launched] == [(q, k, out)]
    assert [ran[9:12] for ran in kernel.ran] == [(other.data_ptr(), k.data_ptr(), out.data_ptr())] * 2
    assert not call.on((other.data_ptr() + 4, 0, out.data_ptr()))
    assert len(kernel.ran) == 2
    empty = made(kernel, programs=0)
    empty.on(named(q, k, out))
    assert not Replay([empty], named(q, k), "query", "out").on((q.data_ptr(), out.data_ptr()))
    assert len(kernel.launched) == 1


def test_a_profiler_sees_what_is_repeated(kernel, monkeypatch):
    launch, (q, k, out) = made(kernel), torch.zeros(3, 8).unbind()
    call = Replay([launch], named(q, k), "query", "out")
    launch.on(named(q, k, out))
    monkeypatch.setattr(knobs.runtime.launch_exit_hook, "calls", [lambda metadata: None])
    assert not call.on((q.data_ptr(), out.data_ptr()))


@pytest.mark.parametrize("names", [("query", "out"), ("key", "out")])
def test_descriptors_follow_the_tensors(kernel, names):
    launch = made(kernel, {"key_desc": Block("key", 4, 16)})
    q, k, out = (torch.zeros(2, 8, 1, 16) for _ in range(3))
    tensors = {"query": q, "key": k, "out": out}
    call = Replay([launch], named(q, k), *names)
    for _ in range(2):
        launch.on(tensors)
    assert call.on([tensors[name].data_ptr() for name in names])
    described = kernel.launched.pop()[1][3], *(ran[12] for ran in kernel.ran)
    assert [x.base.data_ptr() for x in described] == [k.data_ptr()] * 3
    assert all(x.block_shape == [1, 4, 1, 16] for x in described)


def test_a_launch_keeps_no_tensor(kernel):
    launch = made(kernel, {"key_desc": Block("key", 4, 16)})
    kept = [ref(x) for x in launched_on_new_tensors(launch)]
    kernel.launched.clear()
    assert [x() for x in kept] == [None] * 3


def launched_on_new_tensors(launch):
    tensors = [torch.zeros(2, 8, 1, 16) for _ in range(3)]
    for _ in range(2):
        launch.on(named(*tensors))
    return tensors


def test_plans_are_remembered_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(launch_store, "plan_cache", lru_cache(2)(launch_store.plan_cache.__wrapped__))
    asked = []

    @cached_plan
    def plan(key):
        asked.append(key)
        return [key]

    assert plan(1) is plan(1)
    for key in (2, 3, 1):
        plan(key)
    assert asked == [1, 2, 3, 1]
    assert launch_store.plan_cache.cache_info().currsize <= 2


def test_what_is_like_a_blank_is_as_anything_new():
    for shape in ((3,), (1, 1), (2, 5, 1, 4), (1, 7, 3, 8), (5, 1, 1, 1)):
        for dtype in (torch.float16, torch.float32):
            x, new = (
                torch.empty_like(blank(shape, dtype, torch.device("cpu"))),
                torch.empty(shape, dtype=dtype),
            )
            assert (x.shape, x.stride(), x.dtype, x._base) == (new.shape, new.stride(), dtype, None)
