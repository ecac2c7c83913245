"""Lesson 04, processes and collectives: who sends what to whom, and who waits."""

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
        "04.cell_function",
        "A function `hello` is defined in a cell of this notebook. Then "
        "`mp.spawn(hello, nprocs=2)` runs. What happens?",
        Wrong(
            "Two new processes run `hello`, and print their numbers.",
            "They would need the function for that. All they are sent is its name, and "
            "under this name they find nothing.",
        ),
        Right(
            "The new processes fail: they find no function `hello`.",
            "A function is sent by its name: the module `__main__`, and in it `hello`. "
            "In a new process `__main__` is another module, without your cells.",
        ),
        Wrong(
            "`hello` runs twice in the notebook's own process.",
            "spawn always starts new processes, and never runs the function where it "
            "is called.",
        ),
        Wrong(
            "The notebook hangs until you restart its kernel.",
            "spawn watches its processes. When one fails, it ends the others and "
            "raises an error.",
        ),
        measured=True,
    ),
    SingleChoice(
        "04.spawn_args",
        "A script has the line `mp.spawn(worker, args=(n), nprocs=n)`. What does it "
        "do?",
        Wrong(
            "It runs `worker(i, n)` in n processes, for i from 0.",
            "That was the plan. But it would take a tuple, and `(n)` is not one.",
        ),
        Wrong(
            "It runs `worker(n)` in n processes.",
            "spawn always puts the number of the process first. But it does not get "
            "that far.",
        ),
        Right(
            "It raises an error in the new processes.",
            "spawn unpacks `args`. Parentheses only group; the comma makes the tuple. "
            "`(n,)` is a tuple, and so is `(n, m)`, so the mistake shows only with a "
            "single argument.",
        ),
        Wrong(
            "It runs `worker` once, with all n numbers.",
            "nprocs says how many processes there are. `args` is the same for all of "
            "them.",
        ),
        measured=True,
    ),
    Number(
        "04.plus_two",
        "Four ranks run this. What does rank 1 hold in `x` at the end?",
        code="x = torch.zeros(1)\n"
        "if rank == 0:\n"
        "    x += 2\n"
        "    dist.send(x, dst=1)\n"
        "elif rank == 1:\n"
        "    dist.recv(x, src=0)",
        answer=2,
        why="recv writes the message over what was there: the 0 is replaced by 2.",
        hint="What is in x on rank 0 when it is sent? And what does recv do with x on "
        "rank 1?",
        slips={
            0: "recv writes into x: what was in it before is gone.",
            1: "Look again: x += 2.",
        },
        purpose="The next cell runs it.",
        measured=True,
    ),
    SingleChoice(
        "04.early_touch",
        "Rank 0 starts `request = dist.isend(x, dst=1)` with 16 million zeros in x. "
        "In the next line it does `x += 1`, and then `request.wait()`. What does rank "
        "1 receive?",
        Wrong(
            "Zeros, because isend has made a copy of x.",
            "isend makes no copy. It notes where the numbers are, and they are read "
            "when they are sent.",
        ),
        Wrong(
            "Ones, because wait sends x as it is then.",
            "x may be sent at any moment between isend and the end of wait.",
        ),
        Wrong(
            "Nothing, because `x += 1` is an error then.",
            "Nothing guards the tensor, so there is no error.",
        ),
        Right(
            "Nobody can say: zeros, ones, or both.",
            "Until wait has returned, the tensor belongs to the request. The "
            "documentation calls the outcome undefined.",
        ),
        measured=True,
    ),
    SingleChoice(
        "04.all_send",
        "Four ranks stand in a circle. Each calls `dist.send(x, dst=next)` and then "
        "`dist.recv(y, src=previous)`, with 4 bytes each. The backend is gloo. What "
        "happens?",
        Wrong(
            "It works. It would deadlock if all received first.",
            "It works only where send stores the message somewhere and returns. MPI "
            "may do that with small messages. gloo does not.",
        ),
        Wrong(
            "It works, because 4 bytes fit into a buffer of the system.",
            "You might hope so. But gloo first asks the receiver whether it is ready, "
            "whatever the size.",
        ),
        Right(
            "All wait: each send needs a recv that no rank calls.",
            "In gloo a send returns when its message has gone out, and it goes out "
            "when the receiver has called recv.",
        ),
        Wrong(
            "Rank 0 gets through first, and then the others, one by one.",
            "No rank comes first. Each waits for the next, in a circle.",
        ),
        measured=True,
    ),
    Number(
        "04.all_reduce_twice",
        "Four ranks hold 1, 2, 3 and 4 in `x`, as floats. Each calls "
        "`dist.all_reduce(x)`, and by mistake it calls it once more. What does rank 2 "
        "hold at the end?",
        answer=40,
        why="An all-reduce adds up, and every rank gets the sum: 1 + 2 + 3 + 4 = 10. "
        "The second call adds up four tens. Neither of the two divides.",
        hint="What does each rank hold after the first call? The second one does the "
        "same with these numbers.",
        slips={
            10: "That is right after the first call. The second one adds up again: "
            "every rank holds 10 then.",
            2.5: "That is the mean, and a second call would not change it. But an "
            "all-reduce sums, unless you ask for something else.",
            20: "The second call adds up four numbers, not two.",
            100: "They are added, not multiplied: 10 + 10 + 10 + 10.",
            3: "That is what it held before.",
            4: "That would be the maximum: op=dist.ReduceOp.MAX.",
        },
        purpose="The next cells run it.",
        measured=True,
    ),
    Number(
        "04.reduce_scatter",
        "Rank r of four holds a list of four numbers: 10 r, 10 r + 1, 10 r + 2 and 10 "
        "r + 3. All call reduce_scatter with SUM. What does rank 2 get?",
        answer=68,
        why="Rank 2 gets the sum of what is at place 2 of each list: 2 + 12 + 22 + 32.",
        hint="A reduce-scatter adds up the lists, place by place, and gives rank r "
        "place r of the result.",
        slips={
            86: "That is the sum of rank 2's own list.",
            60: "That is what rank 0 gets. Places count from 0.",
            64: "That is what rank 1 gets. Places count from 0.",
            72: "That is what rank 3 gets.",
            17: "That is the mean. Here the operation is SUM.",
            22: "That is rank 2's own number: the others are added to it.",
        },
        purpose="The next cells run it.",
        measured=True,
    ),
    SingleChoice(
        "04.members_only",
        "Only ranks 0 and 2 of four call `dist.new_group([0, 2])`, and then "
        "`all_reduce` in this group. Later all four make another group. With gloo, "
        "`new_group` waits for the members of the group, and for nobody else. What "
        "happens?",
        Wrong(
            "It works, and so does everything that comes after it.",
            "The first part is true here. But ranks 0 and 2 have now counted one more "
            "group than 1 and 3, and the count is a group's name.",
        ),
        Wrong(
            "new_group raises an error on ranks 0 and 2.",
            "new_group does not ask whether the others have called it, too.",
        ),
        Wrong(
            "Ranks 0 and 2 hang in new_group.",
            "The members find each other without the rest. In older versions, where "
            "new_group waited for all ranks, they did hang.",
        ),
        Right(
            "It works, and the next new_group of all four hangs.",
            "Ranks 0 and 2 give the next group another name than ranks 1 and 3, and "
            "look for the others where they are not. The hang comes far from its "
            "cause.",
        ),
        measured=True,
    ),
    Number(
        "04.tree_steps",
        "A tensor goes from rank 0 to all 1,024 ranks. In one step a rank can send one "
        "message, and every rank that has the tensor can send. How many steps are "
        "needed, at least?",
        answer=10,
        unit="steps",
        why="In each step the number of ranks that have the tensor can double: 1, 2, "
        "4, … 1024 = 2 to the power of 10. If rank 0 sent to each in turn, it would be "
        "1,023 steps.",
        hint="How many ranks can have it after one step, after two, after three?",
        slips={
            1023: "That is the number of messages. Many can go at once.",
            1024: "Rank 0 has it already, and all that have it can send.",
            32: "The number can double in each step: 1, 2, 4, 8, 16, …",
            11: "1 rank has it before the first step. After 10 steps it is 1024.",
            9: "After 9 steps it is 512.",
        },
    ),
    SingleChoice(
        "04.busbw",
        "An all-reduce has an algorithm bandwidth (size / time) of 200 GB/s on 8 GPUs, "
        "and of 190 GB/s on 64 GPUs of the same kind. Both use a ring, over links that "
        "are all equally fast. In which of the two are the links used better?",
        Wrong(
            "On 8 GPUs: the sum of a tensor is ready sooner.",
            "That is what the user sees. But for it, a GPU has to send less than on 64 "
            "GPUs.",
        ),
        Right(
            "On 64 GPUs: each link carries more in a second.",
            "The bus bandwidth tells: 200 × 1.75 = 350 GB/s on 8 GPUs, and on 64 it is "
            "190 × 1.969 = 374 GB/s.",
        ),
        Wrong(
            "Neither: 64 GPUs take a little longer for the same work.",
            "It is not the same work: on 64 GPUs, each GPU has to send more.",
        ),
        Wrong(
            "You cannot tell: the numbers of GPUs are different.",
            "The bus bandwidth is made for this: it takes the number of GPUs into "
            "account.",
        ),
    ),
    Number(
        "04.ranks_of_row",
        "A real log of `all_reduce` on nodes with eight B200 GPUs each (S. Bekman, "
        "Machine Learning Engineering) says, for 16 GiB: busbw 376.71 GB/s, algbw "
        "194.43 GB/s. On how many GPUs did it run?",
        answer=32,
        unit="GPUs",
        tolerance=0.2,
        why="376.71 / 194.43 = 1.9375 = 2 (n - 1) / n = 2 - 2 / n, so n = 2 / (2 - "
        "1.9375) = 32: four nodes.",
        hint="busbw / algbw is the factor of the collective. Solve it for n.",
        slips={
            2: "The quotient is not the number of GPUs, but 2 (n - 1) / n.",
            1.9375: "That is the factor 2 (n - 1) / n. Solve it for n.",
            16: "n = 16 would give 30 / 16 = 1.875.",
            8: "n = 8 would give 14 / 8 = 1.75.",
            64: "n = 64 would give 126 / 64 = 1.969.",
            31: "Nearly. 2 (n - 1) / n = 2 - 2 / n: solve this for n.",
            33: "Nearly. Each node has eight GPUs: is that a multiple of 8?",
            4: "That is the number of nodes. Each has eight GPUs.",
        },
    ),
    MultipleChoice(
        "04.true_of_collectives",
        "Each of these lines runs on all four ranks. Which lines do what they are "
        "meant to do?",
        Right(
            "`dist.all_reduce(g)`, then `g /= 4`, to get the mean of all g.",
            "An all-reduce sums, and every rank divides the sum.",
        ),
        Wrong(
            "`if rank == 0: dist.broadcast(x, src=0)`, to send x to all.",
            "Every rank of the group must make the call: the others have to receive.",
        ),
        Wrong(
            "`dist.reduce(x, dst=0)`, for a sum, while ranks 1 to 3 keep their x.",
            "Only rank 0's tensor is defined afterwards. gloo leaves partial sums in "
            "others.",
        ),
        Right(
            "`dist.all_gather(xs, x)`, then `sum(xs)`, in place of an all-reduce.",
            "Every rank has all tensors and adds them up. It is right, but each rank "
            "receives n - 1 whole tensors.",
        ),
        Wrong(
            "`dist.gather(x, xs, dst=0)`, to give the list to every rank.",
            "Only rank `dst` gets it. An all-gather gives it to all.",
        ),
    ),
)

# The number that is a task of the exercise.
PREDICT_MESSAGES = NumberTask(
    "04.predict_messages",
    "Six ranks make a naive all-reduce of a tensor of 1,000 float32 numbers. The other "
    "five send their tensors to rank 0, which adds them up and sends the sum to each "
    "of them. How many bytes are in the messages of all ranks together?",
    answer=40_000,
    unit="bytes",
    title="Predict the messages",
    stars=1,
    why="Five ranks send 4,000 bytes to rank 0, and rank 0 sends 4,000 to each of the "
    "five: 10 messages.",
    hint="Count the messages to rank 0, then those from it. Each is a whole tensor.",
    slips={
        20_000: "That is one half: the tensors to rank 0, or the sums from it.",
        48_000: "Rank 0 sends nothing to itself: five send, and five receive.",
        10_000: "The messages are right. But a float32 has 4 bytes.",
        4000: "That is one message. How many are there?",
        120_000: "Not every rank sends to every other: all goes through rank 0.",
        10: "That is the number of messages. How many bytes has each?",
    },
    hints=(
        "There are two parts: the other ranks send to rank 0, and then rank 0 sends to "
        "each of them. How many other ranks are there?",
        "Every message is a whole tensor. A float32 has 4 bytes.",
        "With 3 ranks it would be:\n"
        "  to rank 0      2 messages of 4000 bytes\n"
        "  from rank 0    2 messages of 4000 bytes\n"
        "  together       16000 bytes",
    ),
)
