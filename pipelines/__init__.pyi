# The public names of this package, for type checkers and for lazy loading.
from .answering.answer import Answer as Answer
from .answering.citations import Citation as Citation
from .answering.conversation import Conversation as Conversation
from .answering.docqa import DocQA as DocQA
from .answering.iterative import IterativeRag as IterativeRag
from .answering.iterative import IterativeSearch as IterativeSearch
from .answering.long_document import LongDocument as LongDocument
from .answering.prompt import Prompt as Prompt
from .answering.prompt import build_prompt as build_prompt
from .knn.knn_lm import KnnLM as KnnLM
