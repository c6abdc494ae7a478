"""The threat ladder: what secret tokens are worth against attackers who know more and more."""
