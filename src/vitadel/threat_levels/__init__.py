"""Threat levels: secret tokens against attackers who know more and more."""
