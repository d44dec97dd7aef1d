"""From options and a machine to the world that is started."""

import pytest

from fsdp_magic.core.specs import InitSpec
from fsdp_magic.errors import UsageError
from fsdp_magic.notebook import world
from fsdp_magic.notebook.world import plan_world


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A machine with as many GPUs as are put into ``gpus["n"]``."""
    machine = {"n": 0}
    monkeypatch.setattr(world, "gpu_count", lambda: machine["n"])
    return machine


def test_more_engines_than_gpus_is_an_error_with_both_numbers(gpus: dict[str, int]) -> None:
    gpus["n"] = 2
    with pytest.raises(UsageError) as caught:
        plan_world(InitSpec(n=4))
    assert "4 engines" in str(caught.value)
    assert "2 GPUs" in str(caught.value)
    assert "--share-gpus" in str(caught.value)


def test_one_gpu_is_named_in_the_singular(gpus: dict[str, int]) -> None:
    gpus["n"] = 1
    with pytest.raises(UsageError, match=r"1 GPU;"):
        plan_world(InitSpec(n=2))


def test_without_a_number_there_is_one_engine_per_gpu_or_two_on_cpu(gpus: dict[str, int]) -> None:
    assert (plan_world(InitSpec()).n, plan_world(InitSpec()).device) == (2, "cpu")
    gpus["n"] = 3
    assert (plan_world(InitSpec()).n, plan_world(InitSpec()).device) == (3, "cuda")
    assert plan_world(InitSpec(device="cpu")).n == 2


def test_engines_may_share_gpus_if_asked_to(gpus: dict[str, int]) -> None:
    gpus["n"] = 2
    plan = plan_world(InitSpec(n=4, share_gpus=True))
    requests = [plan.join_request(rank, directory="/d") for rank in range(4)]
    assert plan.shared
    assert [request.cuda_index for request in requests] == [0, 1, 0, 1]
    assert {request.transport for request in requests} == {"gloo"}
    assert {request.gpu_fraction for request in requests} == {0.5}


def test_engines_with_a_gpu_each_use_nccl_and_all_of_it(gpus: dict[str, int]) -> None:
    gpus["n"] = 2
    request = plan_world(InitSpec(n=2)).join_request(1, directory="/d")
    assert (request.transport, request.cuda_index, request.gpu_fraction) == ("nccl", 1, None)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (InitSpec(device="cuda"), "found no GPU"),
        (InitSpec(share_gpus=True), "no GPU here to share"),
    ],
)
def test_asking_for_gpus_that_are_not_there_is_refused(
    gpus: dict[str, int], spec: InitSpec, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        plan_world(spec)


def test_a_memory_limit_means_cpu_engines_also_where_there_are_gpus(gpus: dict[str, int]) -> None:
    gpus["n"] = 2
    plan = plan_world(InitSpec(memory_limit="1GiB"))
    assert plan.device == "cpu"
    assert plan.join_request(0, directory="/d").memory_limit_bytes == 2**30


def test_a_persons_own_environment_stands(
    gpus: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "OMP_NUM_THREADS" in plan_world(InitSpec()).environment
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert "OMP_NUM_THREADS" not in plan_world(InitSpec()).environment
