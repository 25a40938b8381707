"""What can be chosen of every drafter with caches in training."""

from draftwood.compiler.drafters.kind import Option

AUX_LAYERS = Option(help="layers whose entering states are read (2, L // 2, L - 3)", count=3, value="LAYER")
DRAFT_VOCABULARY = Option(help="draft only the N most written ids", value="N", least=1)
NEGATIVES = Option(help="in a step look at N random ids beside those of its texts (all ids)", value="N", least=0)
SHARED_NOISE = Option(
    help="on sampled text learn the teacher's draw, with noise that both share", read=None, default=False
)
