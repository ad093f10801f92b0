# The public names of this package, for type checkers and for lazy loading.
from .drafters.model.drafter import ModelDrafter as ModelDrafter
from .engine.engine import Engine as Engine
from .reports.generation import Generation as Generation
from .errors import RagspecError as RagspecError
from .models.load import load_model as load_model
from .reports.report import Report as Report
from .sampling.settings import Sampling as Sampling

__version__: str
