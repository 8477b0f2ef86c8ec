"""Conversions in processes of their own, which end before the conversion does."""

import multiprocessing
import os
import signal

from checkpoint_helpers import halve
from fault_shim import FaultyOs, killed

from attnlib.convert.checkpoint import convert, writing

OPTIONS = {"max_shard_size": 4000, "settings": {"converter": "halve"}, "progress": False}


def run(source, out, convert_layer=halve, **options):
    return convert(source, out, convert_layer, **OPTIONS, **options)


def killed_run(source, out, at, options):
    """A run that is killed at one call, for a process of its own."""
    writing.os = FaultyOs(at, killed)
    run(source, out, **options)


def in_a_process(function, *arguments):
    """The exit code of a function in a process that forks from one where all is imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["attnlib.convert.checkpoint", "safetensors.torch", "huggingface_hub", "tqdm"]
    )
    process = context.Process(target=function, args=arguments)
    process.start()
    process.join()
    return process.exitcode


def terminated_run(source, out):
    """A run that is asked to end while it converts layer 1."""

    def terminating(weights, shape):
        if shape.index == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return halve(weights, shape)

    run(source, out, terminating)
