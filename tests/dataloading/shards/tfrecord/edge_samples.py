"""The samples of edge_64.tfrecord, which TensorFlow 2.21 wrote (the script is in the history: tfrecord/make.py)."""

from dataloading.options import PretrainingOptions
from dataloading.preparation.pretraining_data import create_samples
from dataloading.shards.samples import Samples
from dataloading.text.documents import read_documents
from dataloading.text.tokenization import Tokenizer, tokenize_documents
from dataloading.text.vocabulary import Vocabulary
from tests.conftest import REPOSITORY

MAX_SEQ_LENGTH = 64
MAX_PREDICTIONS_PER_SEQ = 10
COUNT = 80


def edge_samples() -> Samples:
    """Return the first samples of the synthetic text golden/edge.txt."""
    options = PretrainingOptions(
        max_seq_length=MAX_SEQ_LENGTH, max_predictions_per_seq=MAX_PREDICTIONS_PER_SEQ, dupe_factor=1
    )
    vocabulary = Vocabulary.from_file(REPOSITORY / "bert" / "artifacts" / "tiny_cpu" / "vocab.txt")
    tokenizer = Tokenizer(vocabulary, options.normalization)
    documents = tokenize_documents(
        read_documents([REPOSITORY / "tests" / "dataloading" / "preparation" / "golden" / "edge.txt"]), tokenizer
    )
    return create_samples(documents, options, tokenizer.vocabulary).slice(0, COUNT)
