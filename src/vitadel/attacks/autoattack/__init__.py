"""AutoAttack and its faster variant."""
