"""The gallery: models that only look robust, or are measured wrongly, and honest ones that look odd.

It tests the diagnosis and serves to learn from; no defense here is worth deploying. Half of every family is held out:
thresholds of checks are chosen on the other half (`scripts/validate_diagnosis.py`).
"""

from vitadel.diagnosis.gallery.entry import BrokenDefense, HonestModel, held_out
from vitadel.diagnosis.gallery.honest import HONEST_MODELS
from vitadel.diagnosis.gallery.inside import INSIDE, Attention, quantize_by_attention, saturated_codebook
from vitadel.diagnosis.gallery.misleading_outputs import OUTPUTS
from vitadel.diagnosis.gallery.mistakes import MISTAKES
from vitadel.diagnosis.gallery.pixels import PIXELS
from vitadel.diagnosis.gallery.varying_outputs import RANDOMNESS

__all__ = [
    "BROKEN_DEFENSES",
    "HONEST_MODELS",
    "Attention",
    "BrokenDefense",
    "HonestModel",
    "held_out",
    "quantize_by_attention",
    "saturated_codebook",
]

BROKEN_DEFENSES: tuple[BrokenDefense, ...] = PIXELS + OUTPUTS + RANDOMNESS + INSIDE + MISTAKES
