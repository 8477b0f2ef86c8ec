"""Both features that change how attention reads a cache have what the cache asks of them."""

import pytest

from attnlib.cache import routes
from attnlib.cache.prefixes.attend import PrefixRoute
from attnlib.cache.prefixes.buffers import SharedPrefixBuffers, SharedPrefixes, SharedPrefixStep
from attnlib.cache.sharded.attend import ShardedRoute
from attnlib.cache.sharded.buffers import ShardedBuffers, ShardedStep, Sharding
from attnlib.kv import Route


def asked_of(protocol: type) -> set[str]:
    return {name for name in {*vars(protocol), *protocol.__annotations__} if not name.startswith("_")}


@pytest.mark.parametrize(
    ("protocol", "made"),
    [
        (routes.RouteOption, SharedPrefixes),
        (routes.RouteOption, Sharding),
        (routes.RouteBuffers, SharedPrefixBuffers),
        (routes.RouteBuffers, ShardedBuffers),
        (routes.StepRoute, SharedPrefixStep),
        (routes.StepRoute, ShardedStep),
        (Route, PrefixRoute),
        (Route, ShardedRoute),
    ],
)
def test_a_feature_answers_everything_that_the_cache_asks(protocol, made):
    assert len(asked_of(protocol)) >= 2
    assert not asked_of(protocol) - {*dir(made)}
