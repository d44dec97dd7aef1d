"""Which rows of which parameter each rank holds."""

import pytest
import torch

from fsdp_magic.core.placement import ParameterPlacement, Placement, shard_rows


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 8])
def test_shards_are_those_of_torch_chunk(world_size: int) -> None:
    for rows in range(1, 40):
        chunks = [len(part) for part in torch.arange(rows).chunk(world_size)]
        chunks += [0] * (world_size - len(chunks))
        ours = [
            shard_rows(rows=rows, world_size=world_size, rank=rank) for rank in range(world_size)
        ]
        assert ours == chunks, f"{rows} rows on {world_size} ranks"


def test_no_rows_are_nowhere() -> None:
    assert [shard_rows(rows=0, world_size=2, rank=rank) for rank in range(2)] == [0, 0]


def parameter(
    name: str, shape: tuple[int, ...], local: tuple[tuple[int, ...], ...]
) -> ParameterPlacement:
    return ParameterPlacement(
        name=name,
        shape=shape,
        local_shapes=local,
        dtype="float32",
        element_bytes=4,
        kind="sharded",
        unit="",
    )


def test_bytes_of_a_rank_are_those_of_its_shards() -> None:
    placement = Placement(
        model="model",
        strategy="full_shard",
        world_size=2,
        parameters=(
            parameter("weight", (3, 5), ((2, 5), (1, 5))),
            parameter("bias", (1,), ((1,), (0,))),
        ),
    )
    assert placement.local_bytes == (44, 20)
    assert placement.global_bytes == 64
    assert placement.parameter_count == 16


def test_a_model_without_parameters_takes_nothing_anywhere() -> None:
    placement = Placement(model="m", strategy="full_shard", world_size=3, parameters=())
    assert placement.local_bytes == (0, 0, 0)
    assert placement.global_bytes == 0


def test_a_placement_is_one_line_where_it_is_printed() -> None:
    parameter = ParameterPlacement(
        name="weight",
        shape=(4, 256),
        local_shapes=((2, 256), (2, 256)),
        dtype="float32",
        element_bytes=4,
        kind="sharded",
        unit="",
    )
    placement = Placement(
        model="model", strategy="full_shard", world_size=2, parameters=(parameter,)
    )
    assert repr(placement) == (
        "<Placement of model: full_shard, 1 parameters of 4.0 KiB over 2 ranks>"
    )
