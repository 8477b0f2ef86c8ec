"""How a kernel is launched: by names, directly with a Triton that is known, and as anybody would with every other."""

from contextlib import contextmanager
from functools import lru_cache, partial
from types import SimpleNamespace

import pytest
import torch

from attnlib.backends._triton import launch as launches
from attnlib.backends._triton.launch import Block, Launch, remembered
from attnlib.backends._triton.tables import LaunchConfig

pytest.importorskip("triton")
from triton import knobs


def named(q, k, out=None):
    """What a launch is given: in another order than the kernel's, and more."""
    return {"size": 0, "key": k, "query": q, "out": out}


class Kernel:
    """A kernel that writes down how it is launched, and what is run of it later."""

    arg_names = ("query_ptr", "key_ptr", "out_ptr", "key_desc", "size", "BLOCK_M")

    def __init__(self):
        self.launched, self.ran, self.devices = [], [], []

    def __getitem__(self, programs):
        def launch(*arguments, **options):
            self.launched.append((programs, arguments, options))
            self.devices.append(launches.current_device())
            return SimpleNamespace(run=self.run, function=7, packed_metadata="metadata")

        return launch

    def run(self, *given):
        self.ran.append(given)
        self.devices.append(launches.current_device())


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launches, "current_device", lambda: -1)  # of tensors on a CPU
    monkeypatch.setattr(launches, "current_stream", lambda device: 99)
    return Kernel()


def made(kernel, blocks=None, programs=3):
    return Launch(kernel, programs, {"size": 5, "other": 1}, LaunchConfig(16, 32, 2, 4), blocks)


def test_tensors_are_taken_by_name_and_then_by_address(kernel):
    launch, (q, k, out) = made(kernel), torch.zeros(3, 8).unbind()
    for _ in range(2):
        launch.on(named(q, k, out))
    assert kernel.launched == [((3,), (q, k, out, None, 5, 16), {"num_warps": 4, "num_stages": 2, "maxnreg": None})]
    addresses = (q.data_ptr(), k.data_ptr(), out.data_ptr())
    assert kernel.ran == [(3, 1, 1, 99, 7, "metadata", None, None, None, *addresses, None, 5, 16)]


def test_an_unknown_triton_launches_every_time(kernel, monkeypatch):
    monkeypatch.setattr(launches, "KNOWN", ("1.0",))
    launch, (q, k, out) = made(kernel), torch.zeros(3, 8).unbind()
    for _ in range(3):
        launch.on(named(q, k, out))
        launch.bound(named(q, k), "query", "out")(q, out)
    assert len(kernel.launched) == 6
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
    monkeypatch.setattr(launches, "current_device", lambda: current[-1])
    monkeypatch.setattr(launches, "current_stream", lambda device: 90 + device)
    bound, on = launch.bound(named(x, x, x), "out"), partial(launch.on, named(x, x, x))
    for current[0] in (0, 1, 0):
        for run in (partial(bound, x), on):
            run()
    assert kernel.devices == [1] * 6  # where it is compiled, and then run
    assert [ran[3] for ran in kernel.ran] == [91] * 5
    assert current == [0]


@pytest.mark.parametrize(("version", "scratch", "is_quick"), [("3.6", 0, True), ("3.6", 8, False), ("3.7", 0, False)])
def test_a_known_launcher_is_skipped_but_where_it_has_work(version, scratch, is_quick, monkeypatch):
    """What it would hand on: the cooperative grid and PDL, no scratch, then what it was given."""
    monkeypatch.setattr(launches, "version", lambda: version)
    sizes = {"global_scratch_size": scratch, "profile_scratch_size": 0}
    run = SimpleNamespace(launch=object(), launch_cooperative_grid=False, launch_pdl=True, **sizes)
    start, constants = launches.started(SimpleNamespace(run=run, function=7, packed_metadata="metadata"))
    given = (7, "metadata", None, None, None)
    assert start is (run.launch if is_quick else run)
    assert constants == ((7, False, True, None, None, *given[1:]) if is_quick else given)


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


def test_what_is_bound_takes_the_rest(kernel):
    launch, (q, k, out, other) = made(kernel), torch.zeros(4, 8).unbind()
    call = launch.bound(named(q, k), "query", "out")
    call(q, out)
    call(other, out)
    assert [x[1][:3] for x in kernel.launched] == [(q, k, out)]
    assert kernel.ran[0][9:12] == (other.data_ptr(), k.data_ptr(), out.data_ptr())
    assert made(kernel, programs=0).bound(named(q, k), "query", "out")(q, out) is None
    assert len(kernel.launched) == 1


@pytest.mark.parametrize("names", [("query", "out"), ("key", "out")])
def test_descriptors_follow_the_tensors(kernel, names):
    launch = made(kernel, {"key_desc": Block("key", 4, 16)})
    q, k, out = (torch.zeros(2, 8, 1, 16) for _ in range(3))
    tensors = {"query": q, "key": k, "out": out}
    call = launch.bound(named(q, k), *names)
    for _ in range(2):
        call(*(tensors[name] for name in names))
    described = kernel.launched[0][1][3], kernel.ran[0][12]
    assert all(x.base is k and x.block_shape == [1, 4, 1, 16] for x in described)


def test_plans_are_remembered_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(launches, "planned", lru_cache(2)(launches.planned.__wrapped__))
    asked = []

    @remembered
    def plan(key):
        asked.append(key)
        return [key]

    assert plan(1) is plan(1)
    for key in (2, 3, 1):
        plan(key)
    assert asked == [1, 2, 3, 1]
    assert launches.planned.cache_info().currsize <= 2
