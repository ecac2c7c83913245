"""theory/planner.py: against the layouts and speeds of Megatron-LM's authors."""

import pytest

from course_utils.theory.models import transformer_shape
from course_utils.theory.planner import Layout, plans, step_operations
from course_utils.theory.simulator import CLUSTERS

SELENE = CLUSTERS["A100, InfiniBand"]
# Narayanan et al., SC21, arXiv 2104.04473, table 1: tensor and pipeline parallel, GPUs,
# batch, and TFLOP/s of a GPU.
PUBLISHED = {
    "1.7 billion": (1, 1, 32, 512, 137),
    "3.6 billion": (2, 1, 64, 512, 138),
    "7.5 billion": (4, 1, 128, 512, 142),
    "18.4 billion": (8, 1, 256, 1024, 135),
    "39.1 billion": (8, 2, 512, 1536, 138),
    "76.1 billion": (8, 4, 1024, 1792, 140),
    "145.6 billion": (8, 8, 1536, 2304, 148),
    "310.1 billion": (8, 16, 1920, 2160, 155),
    "529.6 billion": (8, 35, 2520, 2520, 163),
    "1 trillion": (8, 64, 3072, 3072, 163),
}


def planned(name, **options):
    tp, pp, gpus, batch, measured = PUBLISHED[name]
    cluster = SELENE.with_nodes(gpus // 8)
    found = plans(transformer_shape(name), cluster, batch, **options)
    layout = Layout(pp, gpus // (tp * pp), tp)
    return found, next(plan for plan in found if plan.layout == layout), measured


@pytest.mark.parametrize("utilization", [0.4, 0.6, 0.7])
@pytest.mark.parametrize("name", ["529.6 billion", "1 trillion"])
def test_the_two_largest_published_layouts_are_the_fastest(name, utilization):
    found, published, _ = planned(name, utilization=utilization)
    assert len(found) >= 3
    assert found[0] == published


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_layout_fits_and_is_nearly_as_fast_as_measured(name):
    found, published, measured = planned(name)
    assert published.flops / 1e12 == pytest.approx(measured, rel=0.15)
    assert published.seconds <= 1.13 * found[0].seconds


def test_the_operations_are_those_of_the_paper():
    """Its section 5.1: 8 operations for each token and parameter, nearly."""
    shape = transformer_shape("145.6 billion")
    tokens = 2304 * shape.positions
    assert step_operations(shape, 2304) == pytest.approx(
        8 * tokens * shape.parameters, rel=0.03
    )


def test_a_model_that_does_not_fit_is_told():
    with pytest.raises(
        ValueError, match="No layout of 1 trillion fits on 8 GPUs of 80"
    ):
        plans(transformer_shape("1 trillion"), SELENE, 512)
