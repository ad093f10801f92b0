# The public names of this package, for type checkers and for lazy loading.
from .chat.conversation import Conversation as Conversation
from .docqa.citations import Citation as Citation
from .docqa.docqa import Answer as Answer
from .docqa.docqa import DocQA as DocQA
from .docqa.prompt import Prompt as Prompt
from .docqa.prompt import build_prompt as build_prompt
from .iterative.rag import IterativeRag as IterativeRag
from .knn.knn_lm import KnnLM as KnnLM
from .long.document import LongDocument as LongDocument
