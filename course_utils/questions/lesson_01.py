"""Lesson 01, GPUs, nodes and ranks: who is where, and how long bytes take."""

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
        "01.memory",
        "Training with mixed precision and Adam keeps five numbers for each parameter. "
        "The weight and its gradient have 16 bits. For the optimizer there are a copy "
        "of the weight, the momentum and the variance, in 32 bits each. How many GB do "
        "7.5 billion parameters need?",
        answer=120,
        unit="GB",
        relative_tolerance=0.01,
        why="2 + 2 + 4 + 4 + 4 = 16 bytes for each parameter. 7.5 billion × 16 bytes = "
        "120 billion bytes, and a GB is a billion bytes. The activations come on top.",
        hint="Add up the bytes of the five numbers. A GB is 10⁹ bytes.",
        slips={
            15: "15 GB are the 16-bit weights alone: 2 bytes for each parameter.",
            30: "30 GB are the weights and gradients. The optimizer needs three more "
            "numbers of 4 bytes for each parameter.",
            90: "90 GB are for the optimizer. Weights and gradients are missing.",
            960: "960 is the number of gigabits: a byte has 8 bits.",
            111.76: "112 is the number of GiB, of 2³⁰ bytes. A GB has 10⁹.",
        },
        purpose="The next cell draws your number beside the memory of one GPU.",
        measured=True,
    ),
    SingleChoice(
        "01.split_model",
        "Model parallel splits the model over the GPUs, data parallel splits each "
        "batch. The weights, gradients and optimizer of a model need 120 GB, and a GPU "
        "has 80. Which of the two lets you train it on two such GPUs?",
        Wrong(
            "Data parallel: with half of the batch, a GPU needs half of it.",
            "A smaller batch has fewer activations. The weights, gradients and "
            "optimizer stay the same: with plain data parallel every GPU holds all 120 "
            "GB. (FSDP, in lesson 08, is data parallel that stores the model in "
            "parts.)",
        ),
        Right(
            "Model parallel: each GPU holds only some of the weights.",
            "Each GPU holds a part of the model: some of the layers, or a slice of "
            "each. Gradients and optimizer belong to the weights, so they are split "
            "with them.",
        ),
        Wrong(
            "Both: the two GPUs have 160 GB, whichever way they are used.",
            "With plain data parallel each GPU needs the whole model: 120 GB, and it "
            "has 80.",
        ),
        Wrong(
            "Neither: a backward pass needs the whole model in one place.",
            "A layer's gradient is computed where the layer is. The backward pass then "
            "goes on to the other GPU.",
        ),
    ),
    Number(
        "01.two_threads",
        "A loop in pure Python has a million steps. Two threads of one process each do "
        "half of it. Two CPU cores are free. How many times as fast are the two "
        "threads as one thread that does it all? (Python as it is usually built.)",
        answer=1,
        tolerance=0.25,
        unit="times",
        why="Only one thread of a process can run Python code at a time, so the two "
        "take turns. Together they take about as long as one.",
        hint="How many threads of a process may run Python code at the same moment?",
        slips={
            2: "Twice as fast is what two processes can reach. The threads of one "
            "process share one interpreter, and take turns.",
            0.5: "Half as fast would mean that taking turns doubles the work. It costs "
            "much less than that.",
        },
        purpose="Answer before you run the next cells: they measure it, and draw your "
        "number beside it.",
        measured=True,
    ),
    Number(
        "01.second_server",
        "Two nodes with 4 GPUs each run one job, one process for each GPU. What is the "
        "rank (the global rank) of local rank 1 on the second node?",
        answer=5,
        is_name=True,
        why="The first node holds ranks 0 to 3. On the second, local rank 0 is rank 4 "
        "and local rank 1 is rank 5: 1 × 4 + 1.",
        hint="Write the ranks of both nodes in two rows. All counts begin at 0.",
        slips={
            1: "1 is its local rank. Rank 1 is on the first node.",
            4: "4 is the first rank of the second node, its local rank 0.",
            6: "6 is one too many: ranks and local ranks both count from 0.",
            9: "9 would be on a third node. The second one is node 1.",
            2: "2 is node 1 + local rank 1. But node 0 holds 4 ranks, not one.",
        },
        purpose="The next cell marks your number among the GPUs.",
        measured=True,
    ),
    MultipleChoice(
        "01.three_servers",
        "Three nodes with 8 GPUs each run one job, one process for each GPU. Which "
        "statements are true?",
        Right(
            "Rank 8 runs on node 1.",
            "Node 0 holds ranks 0 to 7, so rank 8 is the first one of node 1.",
        ),
        Wrong(
            "The local world size is 3.",
            "It counts the processes on one node: 8. There are 3 nodes.",
        ),
        Right(
            "Rank 23 is the last one.",
            "The world size is 3 × 8 = 24, and ranks count from 0.",
        ),
        Right(
            "Three processes have local rank 7.",
            "Local ranks begin at 0 on every node, so each node has a local rank 7: "
            "ranks 7, 15 and 23.",
        ),
        Wrong(
            "On the last node, local ranks go from 16 to 23.",
            "16 to 23 are the ranks there. The local ranks are 0 to 7, so that "
            "`torch.cuda.set_device(local_rank)` finds a GPU.",
        ),
    ),
    SingleChoice(
        "01.master",
        "You start a job on two nodes with torchrun, with `--nnodes 2` on both. On "
        "`node0` you add `--node-rank 0 --master-addr node0`. On `node1` you add "
        "`--node-rank 1 --master-addr node1`. What happens?",
        Wrong(
            "It works: each node names its own address.",
            "All processes have to meet at one place, and here there are two.",
        ),
        Wrong(
            "Two jobs start, each with the processes of its node.",
            "Both commands say that there are two nodes, so each waits for the other.",
        ),
        Right(
            "Both nodes wait, until they give up after a timeout.",
            "`node0` waits for `node1`, which looks for a meeting point on itself. "
            "Both must name the same one: node 0, where rank 0 runs.",
        ),
        Wrong(
            "`node1` gets rank 0, as its address is the master's.",
            "Ranks follow from `--node-rank`: rank 0 is on node 0.",
        ),
    ),
    SingleChoice(
        "01.backend",
        "Four nodes, 8 GPUs each, joined by Ethernet. Each process trains on a GPU of "
        "its own. Which backend do you choose?",
        Wrong(
            "gloo, because Ethernet joins the nodes",
            "NCCL also works over Ethernet. PyTorch's documentation names gloo for "
            "GPUs only as the fallback, because it is slower there.",
        ),
        Wrong(
            "mpi, because there are several nodes",
            "NCCL and gloo also work between nodes. PyTorch's packages do not contain "
            "MPI: you would have to build PyTorch from source.",
        ),
        Wrong(
            "nccl inside the nodes, gloo between them",
            "A process group has one backend for its GPU tensors. NCCL finds a way for "
            "each pair of GPUs by itself, inside nodes and between them.",
        ),
        Right(
            "nccl, inside the nodes and between them",
            "It sends from GPU to GPU, by NVLink and PCIe inside a node and by the "
            "network between nodes. PyTorch's documentation names it for GPU training, "
            "with InfiniBand and with Ethernet.",
        ),
    ),
    Number(
        "01.nvlink_time",
        "The data sheet of the H100 says 900 GB/s for NVLink. One GPU sends 9 GB to "
        "another. How many milliseconds does that take at least?",
        answer=20,
        unit="ms",
        why="The 900 GB/s count both directions. One direction has 450 GB/s, and 9 / "
        "450 = 0.02 seconds.",
        hint="The figure adds up what goes out and what comes in. How much of it can "
        "one direction have?",
        slips={
            10: "That uses all of the 900 GB/s. They count both directions, and this "
            "message uses one.",
            5: "The 900 GB/s are the sum of both directions already.",
            80: "That takes the 900 for gigabits. It is GB/s, with a large B.",
            160: "The 900 are bytes already: divide by the directions only.",
            0.02: "That is the time in seconds. The question asks for ms.",
            0.01: "Half of 900 GB/s, and milliseconds instead of seconds.",
        },
        purpose="Answer before you read on: the text below says what 900 GB/s mean.",
        measured=True,
    ),
    Number(
        "01.network_seconds",
        "A model of 7 billion parameters, 2 bytes each, goes from one node to another "
        "over one InfiniBand port of 400 Gb/s. How many seconds does that take at "
        "least?",
        answer=0.28,
        unit="s",
        relative_tolerance=0.02,
        why="7 billion × 2 bytes = 14 GB. 400 Gb/s are 400 / 8 = 50 GB/s. 14 / 50 = "
        "0.28.",
        hint="Convert both to bytes first: how many bytes does the model have, and how "
        "many bytes a second does the port move?",
        slips={
            0.035: "You took 400 Gb/s for 400 GB/s. A small b is a bit.",
            0.14: "Each parameter has 2 bytes: 14 GB, not 7.",
            0.56: "A port of 400 Gb/s has 400 each way, and not 200.",
            2.24: "Divide the 400 by 8 once: it becomes 50 GB/s, not 6.25.",
            280: "That is the time in milliseconds. The question asks for seconds.",
        },
        purpose="Answer before you go on. A cell below draws your number among the "
        "links.",
        measured=True,
    ),
    Number(
        "01.small_message",
        "Two processes of this machine send each other messages. How many times as "
        "long does a message of 4,096 bytes take as one of 4 bytes?",
        answer=1,
        tolerance=0.5,
        unit="times",
        why="Both are so small that nearly all of their time is the latency, which "
        "does not depend on the size.",
        hint="Time = latency + size / bandwidth. Which part is larger for a few "
        "thousand bytes?",
        slips={
            1024: "The bytes are 1,024 times as many, but most of the time is the "
            "latency, which is the same for both.",
            1000: "The bytes are about a thousand times as many, but most of the time "
            "is the latency, which is the same for both.",
        },
        purpose="Answer before you run the next cells: they measure it, and draw your "
        "number beside it.",
        measured=True,
    ),
    SingleChoice(
        "01.pinned",
        "In an ordinary copy over PCIe, the GPU does not read pageable memory "
        "directly. Why not?",
        Right(
            "The system may move ordinary memory during the copy.",
            "It may move the bytes, or write them to disk. A GPU that reads by itself "
            "needs an address that stays valid: pinned memory is host memory that is "
            "locked in its place.",
        ),
        Wrong(
            "Ordinary memory belongs to the process, not to the GPU.",
            "Pinned memory belongs to one process as well.",
        ),
        Wrong(
            "The newest values may still be in the CPU's caches.",
            "The hardware takes care of that: a GPU that reads the CPU's memory gets "
            "the newest values.",
        ),
        Wrong(
            "Ordinary memory has pages, which PCIe cannot address.",
            "Pinned memory consists of pages as well, and PCIe can address both.",
        ),
    ),
)

# The number that is a task of the exercise.
PREDICT_RANK = NumberTask(
    "01.predict_rank",
    "This line has started a job on three nodes with 8 GPUs each. The first node has "
    "`--node-rank` 0, and so on. On the last one, the GPU with local rank 5 does "
    "nothing. Which rank's log do you read?",
    code="torchrun --nnodes 3 --nproc-per-node 8 --node-rank ... train.py",
    answer=21,
    is_name=True,
    title="Predict the rank",
    stars=1,
    why="The last of three nodes is node 2. The nodes before it have 2 × 8 ranks, and "
    "its own node has five ranks before local rank 5.",
    hint="A rank is the number of ranks that come before it: all those on earlier "
    "nodes, and the earlier ones on its own node.",
    slips={
        29: "That would be on a fourth node. Three nodes are 0, 1 and 2.",
        22: "Ranks count from 0, and so do local ranks.",
        20: "Local rank 5 has five others before it on its node.",
        13: "That is on the node in the middle. The last one is node 2.",
        5: "That is its local rank, and every node has a local rank 5.",
        17: "You went across the nodes. The ranks go node by node.",
        7: "Each node before this one holds 8 ranks, not one.",
        42: "Node and local rank are swapped: there are only 24 ranks.",
        16: "That is the first rank on the last node: its local rank is 0.",
        23: "That is the last rank of all: its local rank is 7.",
        24: "That is the world size. The ranks go from 0 to one less.",
    },
    hints=(
        "What is the number of the last node, when the first one is node 0?",
        "Two full nodes come before it. How many ranks are on them?",
        "For local rank 5 on the middle node it goes like this:\n"
        "  ranks before that node   1 * 8 = 8\n"
        "  its rank                 8 + 5 = 13",
    ),
)
