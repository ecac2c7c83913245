"""Lesson 11, meshes: groups, what they send, slices of sequences, experts, plans."""

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
    SingleChoice(
        "11.neighbours",
        "Eight ranks form a mesh with dp = 2 and tp = 4, in this order. With which "
        "ranks does rank 5 average the gradients of its slices?",
        Wrong(
            "With ranks 4, 6 and 7",
            "These share its layers, so they have other slices and other gradients.",
        ),
        Right(
            "With rank 1",
            "Ranks 0 to 3 are one replica and 4 to 7 the other. Rank 5 has the second "
            "place in its row, and so has rank 1.",
        ),
        Wrong(
            "With ranks 1, 3 and 7",
            "What counts is the place in the row, rank % 4.",
        ),
        Wrong(
            "With all other ranks",
            "Most of them hold other slices. A sum with these means nothing.",
        ),
        measured=True,
    ),
    Number(
        "11.sequences",
        "On that mesh, dp = 2 and tp = 4, a step has a batch of 32 "
        "sequences. How many of them does rank 5 work on?",
        answer=16,
        unit="sequences",
        why="The batch is shared among the two replicas. The four ranks of one replica "
        "work on the same 16 sequences, each with its slices.",
        hint="Which ranks have to see the same sequences?",
        slips={
            4: "That would be plain data parallel on eight ranks.",
            8: "The ranks of tp share layers, not sequences.",
            32: "The two replicas share the batch.",
        },
    ),
    SingleChoice(
        "11.innermost",
        "A model of 7.5 billion parameters (36 layers of width 4,096) trains with dp = "
        "8 and tp = 8. In each step every replica works on 64 sequences of 2,048 "
        "tokens, one at a time. What does a GPU send in a step?",
        Wrong(
            "More along dp, as gradients are larger than activations",
            "It sends those of its slices only, an eighth of all, and once in a step.",
        ),
        Wrong(
            "As much along dp as along tp, as both have eight ranks",
            "How much goes around counts as well: gradients or activations.",
        ),
        Wrong(
            "A few times more along tp, as all layers send something",
            "They send something for every sequence. The gradients go once.",
        ),
        Right(
            "Dozens of times more along tp, for layers and sequences",
            "Four all-reduces in each layer, for each of 64 sequences. The gradients "
            "go once in a step.",
        ),
        measured=True,
    ),
    MultipleChoice(
        "11.norm",
        "Now plain data parallel (DDP) beside tensor parallel, without DTensors: every "
        "rank of dp holds the same averaged gradients. Which statements about the norm "
        "of the whole model's gradient are true?",
        Right(
            "Squares of slices are added up over the ranks of tp",
            "Each rank knows its own slices only.",
        ),
        Wrong(
            "Squares are added up over the ranks of dp as well",
            "These hold the same gradients, so the norm would be too large. With FSDP, "
            "where dp holds shards, they would be added up over dp, as `clip` above "
            "does.",
        ),
        Right(
            "Parameters that every rank has whole count once, not tp times",
            "LayerNorms, and the biases of row-parallel layers, are on all ranks of "
            "tp, and equal there.",
        ),
        Wrong(
            "Each rank can clip by the norm of its own slices instead",
            "Then the slices would be scaled differently: another direction.",
        ),
    ),
    Number(
        "11.passes",
        "Four ranks share a sequence, a quarter each. In ring attention keys and "
        "values go around, both in one message. How many such messages does each rank "
        "send in the forward of one attention layer?",
        answer=3,
        unit="messages",
        why="It begins with its own quarter, and three others have to come by. In each "
        "of these three steps, every rank sends a quarter on.",
        hint="With which keys can a rank begin at once?",
        slips={
            4: "Its own keys are there already.",
            6: "That is a ring all-reduce: nothing is added up here.",
            1: "Then each rank would have met two quarters only.",
        },
        purpose="The next cell counts.",
        measured=True,
    ),
    SingleChoice(
        "11.causal",
        "With a causal mask a symbol sees only itself and those before it. The "
        "sequence is cut into four equal pieces, in order. Which rank computes the "
        "most?",
        Wrong(
            "All the same, as their pieces are equally long",
            "The pieces are, but what their symbols may see is not.",
        ),
        Wrong(
            "The first, whose keys are seen by all the others",
            "They are, but the others compute that. Its own queries see one piece.",
        ),
        Right(
            "The last, whose queries see all four pieces",
            "Its queries meet four pieces, those of the first only one. So real "
            "systems give each rank an early and a late piece.",
        ),
    ),
    SingleChoice(
        "11.busiest",
        "Four ranks, an expert on each. The router sends half of all tokens to expert "
        "2, instead of a quarter to each. How does that change the time of the layer?",
        Right(
            "It is longer: all wait for the rank of expert 2",
            "The results come back in an all-to-all, which needs every rank.",
        ),
        Wrong(
            "It is the same: the number of tokens has not changed",
            "In all, no. But one rank computes half of them, twice its share.",
        ),
        Wrong(
            "It is shorter: fewer tokens have to travel to other ranks",
            "On the rank of expert 2 more of its own tokens stay, on the others fewer. "
            "In all, three quarters travel, as before.",
        ),
    ),
)

PREDICT_GROUP = NumberTask(
    "11.predict_group",
    "16 ranks form a mesh with pp = 2, dp = 2 and tp = 4, in this order. Which is the "
    "smallest rank in the dp group of rank 13?",
    answer=9,
    is_name=True,
    title="Predict the group",
    stars=1,
    why="13 = 1 · 8 + 1 · 4 + 1: second stage, second replica, second slice. The same "
    "with the first replica is 1 · 8 + 0 · 4 + 1.",
    hint="Write 13 as pp · 8 + dp · 4 + tp. Only dp differs in its group.",
    slips={
        5: "That differs in pp. Ranks 5 and 13 are two stages of one model.",
        12: "That is in its tp group: ranks 12 to 15.",
        13: "There is another rank in the group, with dp = 0.",
        1: "That differs in pp and in dp.",
    },
    hints=(
        "What are the coordinates of rank 13?",
        "tp = 13 % 4, dp = 13 // 4 % 2, pp = 13 // 8. In a dp group pp and tp agree.",
        "  smallest = 13 - dp * ...",
    ),
)
