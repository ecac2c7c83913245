"""Lesson 08, FSDP: where memory goes, what is sent when, and what it costs."""

from course_utils.questions import (
    MultipleChoice,
    Number,
    NumberTask,
    Right,
    SingleChoice,
    Wrong,
    lesson,
)

QUESTIONS = lesson(
    Number(
        "08.bytes",
        "Training in mixed precision with Adam: weight and gradient are bfloat16, and "
        "all that the optimizer keeps is float32. How many bytes does the optimizer "
        "keep for each parameter?",
        answer=12,
        tolerance=0.2,
        unit="bytes",
        why="A float32 copy of the weight and Adam's two means, 4 bytes each. With "
        "weight and gradient it is 16.",
        hint="How many numbers does it keep for each parameter, and how large is a "
        "float32?",
        slips={
            4: "That is one float32 number, or the weight and its gradient. The "
            "optimizer keeps more.",
            8: "Those are Adam's two means. A copy of the weight is kept, too.",
            6: "That would be three bfloat16 numbers. The optimizer's are float32.",
            16: "That is the total. Weight and gradient are 4 bytes of it.",
        },
        purpose="The next cell measures it.",
        measured=True,
    ),
    SingleChoice(
        "08.activations",
        "A job runs out of memory. Somebody halves the batch of each GPU, and the peak "
        "hardly falls. What fills the memory?",
        Wrong(
            "Gradients, because each row of the batch has its own.",
            "There is one for each parameter: the rows of a batch are summed.",
        ),
        Wrong(
            "Activations, because they depend on the tokens of a sequence.",
            "They do, but on the number of sequences as well: half of the batch has "
            "half of the activations.",
        ),
        Right(
            "Weights and Adam's means, because the model sets their size.",
            "They depend on the parameters alone, as the gradients do. So ZeRO is what "
            "helps, and not a smaller batch.",
        ),
        Wrong(
            "Whole units, because each row gathers the weights again.",
            "A unit is gathered once for all rows of the batch.",
        ),
    ),
    Number(
        "08.stage_one",
        "Mixed precision with Adam: 2 + 2 + 12 bytes for each parameter. Each of your "
        "GPUs has room for 6 bytes for each parameter, beside the activations. How "
        "many GPUs does ZeRO's stage 1 need, at least?",
        answer=6,
        unit="GPUs",
        why="2 + 2 + 12/6 = 6. Weight and gradient take 4 of the 6 bytes, so 2 are "
        "left for the optimizer's share.",
        hint="Which of the three parts does stage 1 split, and how much room do the "
        "other two leave?",
        slips={
            3: "Stage 3 fits on 3 GPUs: it splits all three parts.",
            4: "Stage 2 fits on 4 GPUs: it splits the gradients as well.",
            2: "12/2 = 6. But weight and gradient need room, too.",
            12: "With 12 GPUs it is 5 bytes. Fewer are enough.",
        },
    ),
    SingleChoice(
        "08.collectives",
        "FSDP frees a layer's weights after its forward. Which collective runs before "
        "a layer's forward, which before its backward, and which after its backward?",
        Wrong(
            "broadcast, nothing, all-reduce",
            "That is close to DDP, which broadcasts at the start. In FSDP no rank has "
            "a whole layer that it could broadcast.",
        ),
        Wrong(
            "all-gather, nothing, all-reduce",
            "After the forward the weights were freed, so the backward must gather "
            "them again. And a rank needs only its shard of the sum.",
        ),
        Wrong(
            "reduce-scatter, reduce-scatter, all-gather",
            "The other way around: weights are gathered, gradients are summed and "
            "scattered.",
        ),
        Right(
            "all-gather, all-gather, reduce-scatter",
            "Gather the weights, use them, free them: twice. Then each rank gets its "
            "shard of the summed gradient.",
        ),
    ),
    Number(
        "08.padding",
        "A unit has 10 numbers. Four ranks share it, in shards of one size. How many "
        "numbers are in a shard?",
        answer=3,
        why="10 / 4, rounded up. The four shards have 12 places, so 2 are padding, "
        "both on the last rank.",
        hint="All shards have the same size, and every number must have a place.",
        slips={
            2.5: "Half a number cannot be stored.",
            2: "Then 2 of the 10 numbers have no place.",
            4: "With 4 in each there would be 16 places. Fewer are enough.",
        },
        purpose="The next cell draws them.",
        measured=True,
    ),
    Number(
        "08.peak",
        "Eight layers of the same size, each one a unit, on 4 ranks. No prefetch. How "
        "much memory do parameters take on a rank at the worst moment, as a share "
        "of the whole model's, from 0 to 1?",
        answer=0.375,
        tolerance=0.006,
        why="A quarter of everything, all the time, and one whole layer while it "
        "computes: 1/4 + 1/8.",
        hint="What is there all the time? And what is added while a layer computes?",
        slips={
            0.25: "That is there all the time. One layer at a time is whole, too.",
            0.125: "That is the one whole layer. The shards of all come on top.",
            0.5: "With prefetch, yes. Here only one layer is whole at a time.",
            1: "All of it is never there at once: layers are freed after use.",
            37.5: "That is in percent. A share is a number from 0 to 1.",
            0.34375: "The shard is not taken away while the whole layer is there: both "
            "are in memory.",
        },
        purpose="The next cells measure it.",
        measured=True,
    ),
    Number(
        "08.pile_up",
        "Eight equal layers. In the backward, each layer's reduce-scatter is started, "
        "but the program waits for none of them until the backward is over. How many "
        "whole gradients are in memory at the end?",
        answer=8,
        why="A gradient can be freed only when its reduce-scatter has ended. Without a "
        "wait the program does not know that it has, so all of them pile up.",
        hint="When may the memory of a whole gradient be given back?",
        slips={
            1: "That would need a wait before the next layer's gradient is made.",
            2: "That is what a limit of 2 would give. There is no limit here.",
            0: "They are freed at the very end. And just before that?",
        },
        measured=True,
    ),
    SingleChoice(
        "08.optimizer_first",
        "`optimizer = AdamW(model.parameters())` comes first, `fully_shard(model)` "
        "after it. Then the model is trained. What happens?",
        Right(
            "There is no error, but the loss does not fall.",
            "The optimizer holds the old parameters. They no longer get a gradient, "
            "and an optimizer skips what has no gradient.",
        ),
        Wrong(
            "The first call of `step()` raises an error.",
            "It does not. A parameter whose gradient is None is skipped, as a frozen "
            "one would be.",
        ),
        Wrong(
            "The loss falls as usual, but it takes more memory.",
            "It does take more memory, because the old parameters are kept alive. But "
            "the optimizer knows only these, and the model computes with new ones.",
        ),
        Wrong(
            "The loss falls, and the optimizer's state is sharded.",
            "`fully_shard` does not know about the optimizer.",
        ),
        measured=True,
    ),
    SingleChoice(
        "08.root_only",
        "Somebody writes `fully_shard(model)` for the whole model, and nothing for its "
        "layers. What does that save?",
        Wrong(
            "Nothing: a model must be sharded layer by layer.",
            "Between two steps weights, gradients and the optimizer's state are "
            "shards. That is most of the memory.",
        ),
        Right(
            "Memory between steps; in a step only the optimizer's state.",
            "One call makes one unit. All weights are gathered together, and in the "
            "backward all gradients are there together, beside the shards. At that "
            "moment they take about as much as with DDP.",
        ),
        Wrong(
            "The same as a call for each layer: it finds them by itself.",
            "A call groups the parameters of its module that are in no unit yet. It "
            "does not look for layers.",
        ),
        Wrong(
            "More: one large message is more efficient than many.",
            "There are fewer latencies. But at the worst moment the whole model is in "
            "memory.",
        ),
        measured=True,
    ),
    MultipleChoice(
        "08.reshard",
        "`fully_shard(layer, reshard_after_forward=False)`: what is true?",
        Right(
            "The peak of a step is higher than with `True`.",
            "At the end of the forward all layers are whole.",
        ),
        Right("The backward needs no all-gather.", "The weights are still there."),
        Right(
            "If all layers have it, a step sends as many bytes as with DDP.",
            "One all-gather and one reduce-scatter. Together they are an all-reduce.",
        ),
        Wrong(
            "The optimizer's state is whole as well.",
            "It belongs to the shards, and stays sharded. So less is kept than with "
            "DDP, though as much is sent.",
        ),
        Wrong(
            "The weights are gathered in the first step, and never again.",
            "The optimizer changes the shards in each step, and then the whole weights "
            "are out of date.",
        ),
    ),
    Number(
        "08.traffic",
        "In a step, DDP all-reduces all gradients. FSDP all-gathers all weights twice "
        "and reduce-scatters all gradients, in the same type. How many times as much "
        "does a rank send with FSDP?",
        answer=1.5,
        tolerance=0.02,
        unit="times",
        why="An all-reduce is a reduce-scatter and an all-gather: 2(n - 1)/n of the "
        "model. FSDP has one all-gather more: 3(n - 1)/n.",
        hint="Lesson 07: from which two collectives is an all-reduce made?",
        slips={
            3: "An all-reduce is already two of them.",
            2: "An all-reduce is a reduce-scatter and an all-gather. Count them.",
            1: "One all-gather comes on top: the one before the backward.",
            0.67: "That is DDP's share of FSDP's bytes: the other way around.",
        },
        purpose="The next cells count it.",
        measured=True,
    ),
    SingleChoice(
        "08.faster",
        "GPT-2 XL on 64 GPUs, in nodes of 8. A node has eight H100 and eight "
        "InfiniBand cards of 400 Gb/s, or eight A100 and one Ethernet card of 100 "
        "Gb/s. FSDP sends 1.5 times as much as DDP, which has large buckets here. A "
        "step of FSDP takes how many times as long as a step of DDP?",
        Wrong(
            "1.5 times with InfiniBand, and 1.5 with Ethernet",
            "That would be so if a step did nothing but send. It computes as well, and "
            "computing hides messages: a fast network leaves little over.",
        ),
        Right(
            "1.0 times with InfiniBand, and 1.35 with Ethernet",
            "With a fast network most of it is hidden behind computing, with a slow "
            "one it is not. FSDP buys memory. It pays where that memory is used, for a "
            "larger batch, for example.",
        ),
        Wrong(
            "1.0 times with InfiniBand, and 1.0 with Ethernet",
            "What is hidden depends on the network. With a slow one, the messages take "
            "longer than the computing that could hide them.",
        ),
        Wrong(
            "1.35 times with InfiniBand, and 1.0 with Ethernet",
            "The other way around: the slower network is the one on which more bytes "
            "cost more time.",
        ),
        measured=True,
    ),
    SingleChoice(
        "08.full_on_rank_0",
        "A sharded model is to be saved as one file. Only rank 0 calls "
        "`parameter.full_tensor()`, since only rank 0 writes. What happens?",
        Right(
            "Rank 0 waits for the others.",
            "`full_tensor()` is an all-gather. All ranks must call it, even those that "
            "do not write.",
        ),
        Wrong(
            "Rank 0 gets only its own shard.",
            "It asks for the whole tensor, and that needs the others.",
        ),
        Wrong(
            "It works: rank 0 has a copy of everything.",
            "No rank has a copy of everything. That is the point of FSDP.",
        ),
        Wrong(
            "It works, if the others are not computing.",
            "They must take part, busy or not.",
        ),
    ),
    MultipleChoice(
        "08.checkpoint",
        "A sharded checkpoint was written by 4 ranks with "
        "`torch.distributed.checkpoint`. What is true?",
        Right(
            "To write it, no rank had to hold the whole model.",
            "Each rank writes its own part, all at the same time, without an "
            "all-gather. A full checkpoint needs one.",
        ),
        Right(
            "Three ranks can go on from it.",
            "The metadata says where each piece of each tensor is. Each rank reads "
            "what it needs.",
        ),
        Wrong(
            "Any rank that loads it reads exactly one of the 4 files.",
            "It reads the pieces that it needs. With another number of ranks they are "
            "in several files.",
        ),
        Wrong(
            "If one of the 4 files is lost, most layers are still whole.",
            "Each file has a part of every large tensor, so none would be whole.",
        ),
        Right(
            "With `async_save`, training may go on while it is written.",
            "First the shards are copied, then a thread writes the copies. Training "
            "waits only for the copying.",
        ),
    ),
)

# The number that is a task of the exercise.
PREDICT_PEAK = NumberTask(
    "08.predict_peak",
    "FSDP on 8 GPUs. A model has 32 layers with 500 MB of weights each. Each layer is "
    "a unit, freed after its forward and after its backward; while it computes, the "
    "next layer's all-gather runs. How many MB of weights (shards and whole layers, "
    "without gradients and all else) are on a GPU at the worst moment?",
    answer=3000,
    unit="MB",
    title="Predict the peak",
    stars=1,
    why="The shards of all layers, 32 × 500 / 8 = 2,000 MB, are always there. One "
    "layer is whole because it computes, and another because it is gathered ahead.",
    hint="Add what is there all the time (the shards of all layers), and what is whole "
    "while a layer computes.",
    slips={
        2500: "You left out the next layer: it needs memory for a whole one.",
        1000: "Those are whole layers. The shards of all layers lie there, too.",
        2000: "Those are the shards. Two layers are whole in other memory.",
        2562.5: "What is gathered ahead is a whole layer, not one shard of it.",
        2875: "A layer's shard stays beside the whole layer.",
        16000: "That is the whole model. It is never there all at once.",
        17000: "Only an eighth of each layer is there all the time.",
    },
    hints=(
        "Two kinds of memory: shards, which are always there, and whole layers, which "
        "come and go.",
        "A GPU has an eighth of each layer, all the time. How many whole layers are "
        "there at the worst moment?",
        "For 10 layers of 80 MB on 4 GPUs it goes like this:\n"
        "  shards            10 × 80 / 4 = 200 MB\n"
        "  without prefetch  200 + 80 = 280 MB\n"
        "  with prefetch     200 + 2 × 80 = 360 MB",
    ),
)
