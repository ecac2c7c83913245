"""Lesson 05, distributed SGD by hand: shares, averages, and what is equal to what."""

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
        "05.float_batch",
        "Four ranks share a batch of 128. Each computes `bsz = 128 / float(4)` and "
        "makes `DataLoader(part, batch_size=bsz, shuffle=True)`. What happens?",
        Wrong(
            "It works: 32.0 is as good as 32.",
            "The value is the same, but its type is float. A DataLoader asks for an "
            "int.",
        ),
        Wrong(
            "It works with 4 ranks. With 3 it fails, because 42.67 is not a whole "
            "number.",
            "`/` makes a float in both cases, and the type is what counts.",
        ),
        Wrong(
            "An error when the loop asks for the first batch.",
            "The DataLoader checks its arguments when it is made.",
        ),
        Right(
            "An error as soon as the DataLoader is made.",
            "It wants a positive integer, and 32.0 is a float. `128 // 4` is an int.",
        ),
        measured=True,
    ),
    SingleChoice(
        "05.other_starts",
        "Four ranks begin with different weights. In every step they average their "
        "gradients, and each makes a step of plain SGD. The distance of a rank is the "
        "largest difference between its parameters and those of rank 0. What happens "
        "to the distances?",
        Wrong(
            "They shrink: the average pulls the models together.",
            "Averaged *parameters* would do that. Averaged gradients give all ranks "
            "the same step, wherever they are.",
        ),
        Right(
            "They stay as they are, in every step.",
            "All ranks subtract the same from their weights. So the differences "
            "between them remain, apart from rounding.",
        ),
        Wrong(
            "They grow: each rank sees other images.",
            "Without averaging they would. With it, all make the same step.",
        ),
        Wrong(
            "They are zero after the first step.",
            "The step is the same for all, but it begins at different weights.",
        ),
        measured=True,
    ),
    SingleChoice(
        "05.nothing_averaged",
        "The gradients still differ from rank to rank. Why did "
        "`average_gradients_downloaded` not average them?",
        Wrong(
            "`all_reduce` works on a copy when it is given `.data`.",
            "`.data` shares its memory with the tensor. The sum would be in "
            "`param.grad`.",
        ),
        Right(
            "A parameter's type is `nn.Parameter`, so the `if` is never true.",
            "A Parameter is a subclass of Tensor: isinstance(param, torch.Tensor) is "
            "True, but `type(param) is torch.Tensor` is not. So no line under the `if` "
            "ever ran.",
        ),
        Wrong(
            "`size` is a float, and dividing a gradient in place needs an int.",
            "It does not: `4.0` and `4` give the same.",
        ),
        Wrong(
            "It was called after `backward()`, which is too late for it.",
            "Before it there are no gradients to average.",
        ),
    ),
    Number(
        "05.messages",
        "A model has 20 linear layers, each with a weight and a bias. "
        "`average_gradients_naive` is called once. How many all-reduces does it make?",
        answer=40,
        unit="all-reduces",
        why="One for each parameter: 20 weights and 20 biases.",
        hint="It calls `all_reduce` once for each of `model.parameters()`.",
        slips={
            20: "A layer has two parameters: a weight and a bias.",
            1: "That is the flat version. The naive one sends each by itself.",
            80: "The division sends nothing.",
            160: "All four ranks take part in the same all-reduce.",
        },
        purpose="The next cells count them, and measure the time.",
        measured=True,
    ),
    SingleChoice(
        "05.sum_step",
        "A learning rate of 0.5 is already high for this network, but one process "
        "learns well with it. Four ranks use the same rate with plain SGD, add up "
        "their gradients, and forget to divide. What does the loss do in four epochs?",
        Wrong(
            "It falls as with the average, since sum and mean point the same way.",
            "The direction is the same, but the sum of four gradients is four times "
            "their mean, and so is the step.",
        ),
        Wrong(
            "It falls in fewer steps, since each step is four times as long.",
            "That may happen with a small learning rate. Here the steps are so long "
            "that the loss hardly falls.",
        ),
        Right(
            "It stays near 2.3, as if guessing, since the steps are too long.",
            "The sum is four times the mean, as if the learning rate were 2.0. That is "
            "too large for this network.",
        ),
        Wrong(
            "It grows until it is NaN, since each step is 16 times as long.",
            "Four ranks, four gradients: there is one factor of 4. The loss stays "
            "finite here.",
        ),
        measured=True,
    ),
    SingleChoice(
        "05.why_average",
        'Each rank\'s loss is now a *sum* over its rows (`reduction="sum"`), and so '
        "is that of one process over the whole batch. What must you make of the ranks' "
        "gradients to get the gradient of that one process?",
        Right(
            "Their sum: this time no rank has divided by anything.",
            "The sum of the ranks' sums is the sum over the whole batch. With a mean, "
            "each rank divides by its own b rows, and not by the B of the batch: then "
            "the missing factor is b / B, which is 1 / N.",
        ),
        Wrong(
            "Their mean: there are still N ranks, so divide by N.",
            "Then the result is N times too small. The number of ranks is no reason by "
            "itself: what counts is by what each rank has divided.",
        ),
        Wrong(
            "Their sum, divided by the B rows of the whole batch.",
            "That is the gradient of the mean loss. This one process does not divide.",
        ),
        Wrong(
            "Their mean: a sum would take the models apart.",
            "All ranks make the same step with a sum as well, so their models stay "
            "equal.",
        ),
    ),
    MultipleChoice(
        "05.division",
        "N ranks add up gradients with `all_reduce`, in float32 and with equal shares. "
        "They are to train like one process with the whole batch, with any optimizer. "
        "Where may the division by N happen?",
        Right(
            "The loss is divided by N before `backward()`.",
            "All gradients are then N times smaller, and the sum over the ranks is the "
            "gradient of the whole batch.",
        ),
        Right(
            "Each gradient is divided by N before the all-reduce.",
            "That is what DDP does, while it copies the gradient into a bucket.",
        ),
        Right(
            "The sum is divided by N after the all-reduce.",
            "The same, to rounding. In float16 the sum may overflow first.",
        ),
        Wrong(
            "The learning rate is divided by N.",
            "That is right for plain SGD and momentum, but not with weight decay, "
            "clipping or Adam.",
        ),
        Wrong(
            "Nowhere: `all_reduce` returns the average by default.",
            "Its default is `ReduceOp.SUM`.",
        ),
    ),
    Number(
        "05.padded",
        "10 items, numbered 0 to 9, are spread over 4 ranks by a `DistributedSampler` "
        "with `shuffle=False`. It returns 3 items for each rank. Which one is the last "
        "item of rank 2?",
        answer=0,
        is_name=True,
        why="Rank 2 gets places 2, 6 and 10. Place 10 is beyond the end, so the first "
        "item comes again.",
        hint="The items are dealt out like cards: rank 2 begins with item 2. When no "
        "item is left, the sampler begins again with the first.",
        slips={
            8: "That is the last item if the data is cut into stretches of three. The "
            "sampler deals items out like cards: item 8 goes to rank 0.",
            9: "Item 9 is dealt to rank 1: 1, 5, 9. What comes after it?",
            6: "6 is the second one. All ranks get three.",
            10: "There is no item 10: the last one is 9. It begins again.",
            5: "The items are not cut into stretches, but dealt out like cards.",
            1: "That is the last one of rank 3.",
        },
        purpose="The next cell asks the sampler.",
        measured=True,
    ),
    SingleChoice(
        "05.no_set_epoch",
        "You give a `DataLoader` a `DistributedSampler`, which shuffles unless it is "
        "told not to. You never call `set_epoch`. What does rank 0 get from epoch to "
        "epoch?",
        Wrong(
            "The same items, in the order of the data set itself.",
            "That is the sampler with `shuffle=False`.",
        ),
        Right(
            "The same items, in the same shuffled order.",
            "The sampler shuffles by default. Its order follows from the seed and the "
            "number of the epoch, and that number stays 0.",
        ),
        Wrong(
            "The same items, in a new order in each epoch.",
            "Nothing draws a new order here: the number of the epoch stays 0.",
        ),
        Wrong(
            "Other items in each epoch, in a new order.",
            "That is what `set_epoch` is for: it tells the sampler the epoch.",
        ),
        measured=True,
    ),
    MultipleChoice(
        "05.divide_batch",
        "A script for one GPU has `batch_size=256` and `num_workers=8`. On a machine "
        "with 4 GPUs, each rank makes a loader of its own. Both numbers are often "
        "divided by 4. What is true?",
        Right(
            "If the batch is divided, the learning rate need not change.",
            "4 × 64 make a step of 256 rows again. With 256 on each rank it would have "
            "1,024, and another learning rate.",
        ),
        Right(
            "If `num_workers` stays 8, 32 workers share the CPU cores.",
            "`num_workers` counts for each loader, and all ranks of a machine share "
            "its cores.",
        ),
        Wrong(
            "The batch must be divided, as the four ranks share one memory.",
            "Each GPU has its own memory, as much as before. You *may* keep 256 on "
            "each: it is a batch of 1,024 then.",
        ),
        Right(
            "PyTorch divides neither of them by itself.",
            "`DataLoader` knows nothing of other ranks, and DDP does not change it. "
            "`nn.DataParallel` is different: it cuts the batch.",
        ),
        Wrong(
            "`DistributedSampler` refuses a batch that is larger than its share.",
            "It never sees the batch size: it only says which items are for this rank.",
        ),
    ),
    Number(
        "05.mean_of_means",
        "Ranks 0, 1 and 2 have evaluated 100 images each, and got 90 right. Rank 3 had "
        "only 20 images, and got 10 right. What is the accuracy over all images?",
        answer=87.5,
        unit="%",
        tolerance=0.05,
        why="280 of 320 images are right. The mean of 90, 90, 90 and 50 % is 80 %: it "
        "lets 20 images count as much as 100.",
        hint="How many images are there, and how many of them are right?",
        slips={
            80: "That is the mean of 90, 90, 90 and 50 %: a mean of means.",
            70: "That is halfway between 90 and 50 %.",
            90: "Rank 3 counts, too.",
            0.875: "In percent, please.",
            280: "That is how many are right. Of how many?",
        },
        purpose="The next cell computes it in two ways.",
        measured=True,
    ),
    MultipleChoice(
        "05.linear_rule",
        "A recipe for one GPU has batches of 64 and a learning rate of 0.1. You run it "
        "on 8 GPUs. What is true?",
        Right(
            "With 64 rows on each GPU, the linear rule gives a learning rate of 0.8.",
            "The batch of a step is 512, eight times 64.",
        ),
        Right(
            "With 8 rows on each GPU, the learning rate stays 0.1.",
            "The batch of a step is 64, as before. What counts is the batch, not the "
            "number of GPUs.",
        ),
        Wrong(
            "DDP multiplies the learning rate by the number of GPUs.",
            "It averages gradients, and leaves the learning rate to you.",
        ),
        Wrong(
            "The rule holds for any batch size, as long as there is a warm-up.",
            "You have seen its limit: for 320 images the rule gave a rate that is too "
            "large for the network. The paper names a limit, too.",
        ),
        Right(
            "The reason for a warm-up: weights change quickly at the beginning.",
            "The rule takes the gradient to be nearly the same over k small steps. At "
            "the beginning it is not.",
        ),
    ),
)

# The number that is a task of the exercise.
PREDICT_RATE = NumberTask(
    "05.predict_rate",
    "A recipe says: learning rate 0.1 for batches of 256 images. You have 2 nodes with "
    "8 GPUs each, one rank for each GPU, and `batch_size=96` on each rank. Which "
    "learning rate does the linear rule give?",
    answer=0.6,
    title="Predict the learning rate",
    stars=1,
    why="A step of 16 ranks uses 16 × 96 = 1,536 images: six times the 256 of the "
    "recipe, so six times its learning rate.",
    hint="Work out the batch of one step on all GPUs. How many times 256 is it?",
    slips={
        1.6: "You multiplied by the number of GPUs. That would be right if each of "
        "them had the 256 images of the recipe. Compare the batches of a step.",
        0.3: "You used the batch of one node. A step uses the images of both.",
        0.0375: "You used the batch of one GPU. A step uses the images of all GPUs.",
        0.2449: "That is a square-root rule. The task asks for the linear one.",
        0.0167: "The other way round: a larger batch makes fewer steps in an epoch, "
        "and the rule makes each of them longer.",
        0.1: "That is the rate of the recipe. The batch of a step is another one.",
        153.6: "You multiplied by the whole batch. The rule multiplies by how many "
        "times the recipe's batch it is.",
        9.6: "You multiplied by the batch of one GPU. The rule multiplies by how many "
        "times the recipe's batch the batch of all GPUs is.",
        6: "You are on the way: that is not the learning rate yet.",
        1536: "You are on the way: that is not the learning rate yet.",
    },
    hints=(
        "How many images does one step use, over all GPUs of both nodes?",
        "The linear rule: k times the batch, k times the learning rate. The batch is "
        "(number of GPUs) × (images on each); k is that divided by 256.",
        "For 4 GPUs with 128 images each it goes like this:\n"
        "  batch   4 * 128      = 512\n"
        "  k       512 / 256    = 2\n"
        "  rate    0.1 * 2      = 0.2",
    ),
)
