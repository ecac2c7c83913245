"""Every drawing of the course: data in, a `Picture` out.

    >>> from course_utils import pictures
    >>> picture = pictures.guess_and_measured(2.0, 3.0, "s", "A first cell")
    >>> print(picture)
    A first cell: guess 2 s, measured 3 s. The measured value is 1.5 times the guess.

A `Picture` is a matplotlib `Figure` with a text `summary` that holds the numbers it
draws. As the last expression of a cell it shows itself, with the summary as its
alternative text; `print(picture)` prints the summary; `picture.savefig` writes a file.
Nothing here goes through pyplot, so no picture shows twice and the backend stays as
it is. The same data give the same picture, whatever style a learner has set.

Colours are Okabe and Ito's, which colour-blind readers can tell apart. No meaning is
in a colour alone: it is also in a word, a hatch, a line style or a marker. Texts are
at least 9 pt. Lengths are inches, from the bottom left of the picture.
"""

from course_utils.pictures.charts import bars, guess_and_measured
from course_utils.pictures.collective_calls import collective_call
from course_utils.pictures.collectives import collective
from course_utils.pictures.course_map import course_map
from course_utils.pictures.draw import Picture
from course_utils.pictures.machines import (
    bandwidth_ladder,
    four_ways,
    machine,
    ranks_on_cores,
    ranks_on_nodes,
    torchrun_ranks,
    transfer_ladder,
)
from course_utils.pictures.memory import (
    bytes_by_stage,
    device_memory,
    memory_by_stage,
    memory_over_time,
    memory_per_gpu,
)
from course_utils.pictures.mesh import mesh
from course_utils.pictures.messages import data_parallel_steps, message_steps
from course_utils.pictures.ring import ring_step
from course_utils.pictures.shards import ddp_buckets, flat_shards, partition
from course_utils.pictures.slices import sliced_linear
from course_utils.pictures.speeds import (
    collective_bandwidth,
    micro_batch_times,
    predicted_and_measured,
    scaling,
    transfer_times,
)
from course_utils.pictures.timelines import (
    device_timeline,
    fsdp_schedule,
    layers_on_devices,
    overlap,
    pipeline,
    pipeline_ticks,
    step_events,
    timeline,
)
from course_utils.pictures.training import (
    difference_by_step,
    learning_rates,
    training_curves,
)
from course_utils.pictures.what_if import what_if
