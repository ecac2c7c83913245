"""The memory that training needs on each GPU, by stage of ZeRO, against real cards."""

from course_utils.pictures import draw, words
from course_utils.pictures.draw import Picture
from course_utils.pictures.memory import memory_per_gpu
from course_utils.theory import costs

_STAGES = ("stage 0 (DDP)", "stage 1", "stage 2", "stage 3 (FSDP)")
_LIMITS = {"gpus": 1024, "batch_per_gpu": 64, "tokens": 32_768}


def bytes_by_stage(
    model: str = "7.5 billion",
    gpus: int = 8,
    optimizer: str = "adam",
    precision: str = "mixed",
    batch_per_gpu: int = 1,
    tokens: int = 2048,
    recompute: str = "none",
) -> dict[str, dict[str, float]]:
    """What a transformer in training holds on each GPU, in bytes, by formulas alone.

    "other" is what sharding needs besides its shards: the largest unit, as long as it
    computes, with its whole parameters in stage 3, and its whole gradient in stages 2
    and 3. A unit is a layer, or the embedding.

    Args:
        model: The name of one of `costs.TRANSFORMERS`.
        gpus: How many there are, 1 to 1024.
        optimizer: "sgd", "momentum" (SGD with it) or "adam".
        precision: "float32", "bfloat16" or "mixed": see `costs.state_bytes`.
        batch_per_gpu: Sequences for each GPU, 1 to 64.
        tokens: Of a sequence, 1 to 32,768.
        recompute: What is dropped after the forward pass and computed again: "none",
            "selective" or "full", see `costs.activation_bytes`.

    Returns:
        From a stage to bytes by category, as `pictures.memory_per_gpu` takes it.

    Raises:
        ValueError: a setting does not exist or is out of range.
    """
    shape = costs.transformer_shape(model)
    sizes = {"gpus": gpus, "batch_per_gpu": batch_per_gpu, "tokens": tokens}
    for what, value in sizes.items():
        words.whole(value, what, 1, _LIMITS[what])
    each = 4 if precision == "float32" else 2

    def activations(recompute: str, layers: int = 1, vocabulary: int = 0) -> float:
        return costs.activation_bytes(
            batch_per_gpu,
            tokens,
            shape.width,
            shape.heads,
            layers=layers,
            vocabulary=vocabulary,
            element_bytes=each,
            recompute=recompute,
        )

    # What all layers keep, and what one of them computes again.
    kept = activations(recompute, shape.layers, shape.vocabulary)
    kept += activations("none") - activations(recompute)
    one = costs.state_bytes(optimizer, precision)
    layer = costs.transformer_parameters(1, shape.width, 1) - 3 * shape.width
    unit = max(layer, shape.parameters - shape.layers * layer)
    held = {}
    for stage, name in enumerate(_STAGES):
        states = costs.zero_memory(
            shape.parameters,
            gpus=gpus,
            stage=stage,
            optimizer=optimizer,
            precision=precision,
        )
        whole = one.parameters * (stage == 3) + one.gradients * (stage >= 2)
        held[name] = {
            "parameters": states.parameters,
            "gradients": states.gradients,
            "optimizer state": states.optimizer,
            "activations": kept,
            "other": unit * whole if gpus > 1 else 0.0,
        }
    return held


@draw.picture
def memory_by_stage(
    model: str = "7.5 billion",
    gpus: int = 8,
    optimizer: str = "adam",
    precision: str = "mixed",
    batch_per_gpu: int = 1,
    tokens: int = 2048,
    recompute: str = "none",
) -> Picture:
    """What DDP and each stage of ZeRO need on each GPU, and on which cards they fit.

    The arguments and errors are those of `bytes_by_stage`.
    """
    sizes = gpus, optimizer, precision, batch_per_gpu, tokens, recompute
    held = bytes_by_stage(model, *sizes)
    size = f"{model} parameters" if model[0].isdigit() else model
    title = f"{size} on {words.count(gpus, 'GPU')}: each GPU, by stage of ZeRO"
    picture = memory_per_gpu(held, title=title)
    fits = []
    for name, by_category in held.items():
        total = sum(by_category.values())
        cards = [card.name for card in costs.CARDS if card.nbytes >= total]
        where = words.listed(cards) if cards else "no card"
        fits.append(words.sentence(f"{name} fits on {where}"))
    shape = costs.transformer_shape(model)
    lines = [
        *fits,
        "other: one whole unit, as long as it computes.",
        f"Model: {shape.parameters:,} parameters; {shape.layers} layers of width "
        f"{shape.width:,}, {shape.heads} heads, {shape.vocabulary:,} tokens. "
        f"{shape.source}.",
        "Computed: ZeRO, arXiv 1910.02054; activations, arXiv 2205.05198, without "
        "FlashAttention.",
        "A real job needs more: CUDA takes some hundred MB, and memory is fragmented.",
    ]
    draw.below(picture, lines)
    picture.summary += " " + " ".join(fits)
    return picture
