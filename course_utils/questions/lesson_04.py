"""Lesson 04, processes and collectives: who sends what to whom, and who waits."""

from course_utils.questions import (
    Choice,
    MultipleChoice,
    Number,
    NumberTask,
    SingleChoice,
    Slip,
    lesson,
)

QUESTIONS = lesson(
    "04",
    SingleChoice(
        "04.cell_function",
        "A function `hello` is defined in a cell of this notebook. Then "
        "`mp.spawn(hello, nprocs=2)` runs. What happens?",
        [
            Choice(
                "Two new processes run `hello`, and print their numbers.",
                why="They would need the function for that. All they are sent is its "
                "name, and under this name they find nothing.",
            ),
            Choice(
                "The new processes fail: they find no function `hello`.",
                right=True,
                why="A function is sent by its name: the module `__main__`, and in it "
                "`hello`. In a new process `__main__` is another module, without your "
                "cells.",
            ),
            Choice(
                "`hello` runs twice in the notebook's own process.",
                why="spawn always starts new processes, and never runs the function "
                "where it is called.",
            ),
            Choice(
                "The notebook hangs until you restart its kernel.",
                why="spawn watches its processes. When one fails, it ends the others "
                "and raises an error.",
            ),
        ],
        measured=True,
    ),
    SingleChoice(
        "04.args_tuple",
        "Many tutorials have the line `mp.spawn(worker, args=(n), nprocs=n)`. What "
        "does it do?",
        [
            Choice(
                "It runs `worker(i, n)` in n processes, for i from 0.",
                why="That was the plan. But it would take a tuple, and `(n)` is not "
                "one.",
            ),
            Choice(
                "It runs `worker(n)` in n processes.",
                why="spawn always puts the number of the process first. But it does "
                "not get that far.",
            ),
            Choice(
                "It raises an error: `(n)` is a number, not a tuple.",
                right=True,
                why="spawn unpacks `args`. Parentheses only group; the comma makes the "
                "tuple. `(n,)` is a tuple, and so is `(n, m)`, so the mistake shows "
                "only with a single argument.",
            ),
            Choice(
                "It runs `worker` once, with all n numbers.",
                why="nprocs says how many processes there are. `args` is the same for "
                "all of them.",
            ),
        ],
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
        slips=[
            Slip(0, "recv writes into x: what was in it before is gone."),
            Slip(1, "Look again: x += 2."),
        ],
        purpose="The next cell runs it.",
        measured=True,
    ),
    SingleChoice(
        "04.early_touch",
        "Rank 0 starts `request = dist.isend(x, dst=1)` with zeros in x. In the next "
        "line it does `x += 1`, and then `request.wait()`. What does rank 1 receive?",
        [
            Choice(
                "Zeros, because isend has made a copy of x.",
                why="isend makes no copy. It notes where the numbers are, and they are "
                "read when they are sent.",
            ),
            Choice(
                "Ones, because wait sends x as it is then.",
                why="x may be sent at any moment between isend and the end of wait.",
            ),
            Choice(
                "Nothing, because `x += 1` is an error then.",
                why="Nothing guards the tensor, so there is no error.",
            ),
            Choice(
                "Nobody can say: zeros, ones, or both.",
                right=True,
                why="Until wait has returned, the tensor belongs to the request. The "
                "documentation calls the outcome undefined.",
            ),
        ],
        measured=True,
    ),
    SingleChoice(
        "04.all_send",
        "Four ranks stand in a circle. Each calls `dist.send(x, dst=next)` and then "
        "`dist.recv(y, src=previous)`, with 4 bytes each. The backend is gloo. What "
        "happens?",
        [
            Choice(
                "It works. It would deadlock if all received first.",
                why="It works only where send stores the message somewhere and "
                "returns. MPI may do that with small messages. gloo does not.",
            ),
            Choice(
                "It works, because 4 bytes fit into a buffer of the system.",
                why="You might hope so. But gloo first asks the receiver whether it is "
                "ready, whatever the size.",
            ),
            Choice(
                "All wait: each send needs a recv that no rank calls.",
                right=True,
                why="In gloo a send returns when its message has gone out, and it goes "
                "out when the receiver has called recv.",
            ),
            Choice(
                "Rank 0 gets through first, and then the others, one by one.",
                why="No rank comes first. Each waits for the next, in a circle.",
            ),
        ],
        measured=True,
    ),
    Number(
        "04.sum_not_mean",
        "Four ranks hold 1, 2, 3 and 4 in `x`, as floats. Each calls "
        "`dist.all_reduce(x)`, and by mistake it calls it once more. What does rank 2 "
        "hold at the end?",
        answer=40,
        why="An all-reduce adds up, and every rank gets the sum: 1 + 2 + 3 + 4 = 10. "
        "The second call adds up four tens. Neither of the two divides.",
        hint="What does each rank hold after the first call? The second one does the "
        "same with these numbers.",
        slips=[
            Slip(
                10,
                "That is right after the first call. The second one adds up again: "
                "every rank holds 10 then.",
            ),
            Slip(
                2.5,
                "That is the mean, and a second call would not change it. But an "
                "all-reduce sums, unless you ask for something else.",
            ),
            Slip(20, "The second call adds up four numbers, not two."),
            Slip(100, "They are added, not multiplied: 10 + 10 + 10 + 10."),
            Slip(3, "That is what it held before."),
            Slip(4, "That would be the maximum: op=dist.ReduceOp.MAX."),
        ],
        purpose="The next cells run it.",
        measured=True,
    ),
    Number(
        "04.reduce_scatter",
        "Rank r of four holds a list of four numbers: 10 r, 10 r + 1, 10 r + 2 and "
        "10 r + 3. All call reduce_scatter with SUM. What does rank 2 get?",
        answer=68,
        why="Rank 2 gets the sum of what is at place 2 of each list: 2 + 12 + 22 + 32.",
        hint="A reduce-scatter adds up the lists, place by place, and gives rank r "
        "place r of the result.",
        slips=[
            Slip(86, "That is the sum of rank 2's own list."),
            Slip(60, "That is what rank 0 gets. Places count from 0."),
            Slip(64, "That is what rank 1 gets. Places count from 0."),
            Slip(72, "That is what rank 3 gets."),
            Slip(17, "That is the mean. Here the operation is SUM."),
            Slip(22, "That is rank 2's own number: the others are added to it."),
        ],
        purpose="The next cells run it.",
        measured=True,
    ),
    SingleChoice(
        "04.members_only",
        "Only ranks 0 and 2 of four call `dist.new_group([0, 2])`, and then "
        "`all_reduce` in this group. The documentation says that all ranks must call "
        "new_group. What happens with gloo in the PyTorch of this course?",
        [
            Choice(
                "It works, and so does everything that comes after it.",
                why="The first part is true here. But ranks 0 and 2 have now counted "
                "one more group than 1 and 3, and the count is a group's name.",
            ),
            Choice(
                "new_group raises an error on ranks 0 and 2.",
                why="new_group does not ask whether the others have called it, too.",
            ),
            Choice(
                "Ranks 0 and 2 hang in new_group.",
                why="They did in older versions, where new_group waited for all ranks. "
                "Here the members find each other without the rest.",
            ),
            Choice(
                "It works, and the next new_group of all four hangs.",
                right=True,
                why="Ranks 0 and 2 give the next group another name than ranks 1 and "
                "3, and look for the others where they are not. The hang comes far "
                "from its cause.",
            ),
        ],
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
        slips=[
            Slip(1023, "That is the number of messages. Many can go at once."),
            Slip(1024, "Rank 0 has it already, and all that have it can send."),
            Slip(32, "The number can double in each step: 1, 2, 4, 8, 16, …"),
            Slip(11, "1 rank has it before the first step. After 10 steps it is 1024."),
            Slip(9, "After 9 steps it is 512."),
        ],
    ),
    SingleChoice(
        "04.busbw",
        "An all-reduce has an algorithm bandwidth (size / time) of 200 GB/s on 8 GPUs, "
        "and of 190 GB/s on 64 GPUs of the same kind. In which of the two are the "
        "links of the GPUs used better?",
        [
            Choice(
                "On 8 GPUs: the sum of a tensor is ready sooner.",
                why="That is what the user sees. But for it, a GPU has to send less "
                "than on 64 GPUs.",
            ),
            Choice(
                "On 64 GPUs: each link carries more in a second.",
                right=True,
                why="The bus bandwidth tells: 200 × 1.75 = 350 GB/s on 8 GPUs, and on "
                "64 it is 190 × 1.969 = 374 GB/s.",
            ),
            Choice(
                "Neither: they differ only as two runs may differ.",
                why="The bus bandwidths differ by more than that, and the other way "
                "round.",
            ),
            Choice(
                "You cannot tell: the numbers of GPUs are different.",
                why="The bus bandwidth is made for this: it takes the number of GPUs "
                "into account.",
            ),
        ],
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
        slips=[
            Slip(2, "The quotient is not the number of GPUs, but 2 (n - 1) / n."),
            Slip(1.9375, "That is the factor 2 (n - 1) / n. Solve it for n."),
            Slip(16, "n = 16 would give 30 / 16 = 1.875."),
            Slip(8, "n = 8 would give 14 / 8 = 1.75."),
            Slip(64, "n = 64 would give 126 / 64 = 1.969."),
            Slip(31, "Nearly. 2 (n - 1) / n = 2 - 2 / n: solve this for n."),
            Slip(33, "Nearly. Each node has eight GPUs: is that a multiple of 8?"),
            Slip(4, "That is the number of nodes. Each has eight GPUs."),
        ],
    ),
    MultipleChoice(
        "04.true_of_collectives",
        "Each of these lines runs on all four ranks. Which lines do what they are "
        "meant to do?",
        [
            Choice(
                "`dist.all_reduce(g)`, then `g /= 4`, to get the mean of all g.",
                right=True,
                why="An all-reduce sums, and every rank divides the sum.",
            ),
            Choice(
                "`if rank == 0: dist.broadcast(x, src=0)`, to send x to all.",
                why="Every rank of the group must make the call: the others have to "
                "receive.",
            ),
            Choice(
                "`dist.reduce(x, dst=0)`, for a sum, while ranks 1 to 3 keep their x.",
                why="Only rank 0's tensor is defined afterwards. gloo leaves partial "
                "sums in others.",
            ),
            Choice(
                "`dist.all_gather(xs, x)`, then `sum(xs)`, in place of an all-reduce.",
                right=True,
                why="Every rank has all tensors and adds them up. It is right, but "
                "each rank receives n - 1 whole tensors.",
            ),
            Choice(
                "`dist.gather(x, xs, dst=0)`, to give the list to every rank.",
                why="Only rank `dst` gets it. An all-gather gives it to all.",
            ),
        ],
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
    slips=[
        Slip(20_000, "That is one half: the tensors to rank 0, or the sums from it."),
        Slip(48_000, "Rank 0 sends nothing to itself: five send, and five receive."),
        Slip(10_000, "The messages are right. But a float32 has 4 bytes."),
        Slip(4000, "That is one message. How many are there?"),
        Slip(120_000, "Not every rank sends to every other: all goes through rank 0."),
        Slip(10, "That is the number of messages. How many bytes has each?"),
    ],
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
