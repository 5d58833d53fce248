"""The errors of a training run that are the user's to mend: the command line prints them without a traceback."""

from narrowgate.flow import CollapseError, VerificationError
from narrowgate.models import ModelError
from narrowgate.train.arrays import DataError
from narrowgate.train.checkpoint import CheckpointError
from narrowgate.train.recipe import RecipeError
from narrowgate.train.watch import TrainingError

EXPECTED = (
    RecipeError,
    DataError,
    ModelError,
    CheckpointError,
    TrainingError,
    CollapseError,
    VerificationError,
    OSError,  # a folder that exists or can't be written, a full disk
)
