"""The picture of a training step on a cluster that nobody here has: all simulated."""

from course_utils.pictures import draw, words
from course_utils.pictures.draw import Picture
from course_utils.pictures.timelines import overlap as drawn
from course_utils.pictures.timelines import step_events
from course_utils.theory import costs, simulator
from course_utils.theory.arguments import one_of

_MOST_NAIVE = 128  # GPUs: more take too long to simulate between two moves of a slider
_MOST_NODES = 1250


@draw.picture
def what_if(
    cluster: str = "H100, InfiniBand",
    model: str = "GPT-2 XL",
    nodes: int = 128,
    samples_per_gpu: int = 4096,
    bucket_mib: int = 25,
    overlap: bool = True,
    algorithm: str = "ring",
    slowdown_of_one_gpu: float = 1.0,
) -> Picture:
    """One step of DDP on a cluster: computing, all-reduces, and what is exposed.

    It is simulated, by `simulator.ddp_step`.

    Args:
        cluster: One of `simulator.CLUSTERS`.
        model: One of `simulator.MODELS`.
        nodes: How many nodes, 1 to 1250.
        samples_per_gpu: Tokens of a GPT-2, images of a ResNet-50.
        bucket_mib: The cap of DDP's buckets, in MiB.
        overlap: Whether all-reduces go on during the backward pass.
        algorithm: Of the all-reduce; one of `simulator.ALGORITHMS`.
        slowdown_of_one_gpu: How many times slower than the others it computes.

    Raises:
        ValueError: a setting does not exist or is out of range, or the algorithm does
            not run on so many GPUs.
    """
    one_of(cluster, "cluster", simulator.CLUSTERS)
    one_of(model, "model", simulator.MODELS)
    words.whole(nodes, "nodes", 1, _MOST_NODES)
    pod, trained = (
        simulator.CLUSTERS[cluster].with_nodes(nodes),
        simulator.MODELS[model],
    )
    if algorithm == "naive" and pod.gpus > _MOST_NAIVE:
        raise ValueError(
            f"On {pod.gpus:,} GPUs rank 0 would receive and send {pod.gpus - 1:,} "
            "messages for each bucket, one after the other: too long, also to "
            f"simulate. Take at most {_MOST_NAIVE} GPUs."
        )
    step = simulator.ddp_step(
        pod,
        trained,
        samples_per_gpu,
        algorithm=algorithm,
        overlap=overlap,
        bucket_bytes=bucket_mib * costs.MiB,
        slow_gpus={0: slowdown_of_one_gpu} if slowdown_of_one_gpu != 1 else None,
    )
    title = f"Simulated: {model} on {words.count(pod.gpus, 'GPU')}"
    picture = drawn(step_events(step), title=title)
    batch = pod.gpus * samples_per_gpu
    mib = [bucket.nbytes / costs.MiB for bucket in step.buckets]
    buckets = f"in {len(mib)} buckets, the largest with {max(mib):,.1f} MiB"
    shares = ", ".join(
        f"{name} {words.duration(seconds)} ({100 * seconds / step.seconds:.3g} %)"
        for name, seconds in (
            ("computing", step.compute),
            ("waiting for the slowest GPU", step.waiting),
            ("exposed communication", step.exposed),
        )
        if seconds
    )
    lines = [
        f"{words.duration(step.seconds)} a step: {shares}.",
        f"Scaling efficiency {100 * step.efficiency:.3g} %; a batch of {batch:,} "
        f"{trained.sample}s, {words.spoken(batch / step.seconds)} a second.",
        f"Gradients: {sum(mib):,.1f} MiB {buckets if len(mib) > 1 else 'in 1 bucket'}.",
        "Here GPUs compute at half of their peak, and links reach their data sheets. "
        "Real clusters are slower.",
        f"Model: {trained.parameters / 1e6:,.4g} million parameters; {trained.source}.",
        f"{cluster}: {pod.source}.",
    ]
    draw.below(picture, lines)
    picture.summary += " " + " ".join(lines)
    return picture
