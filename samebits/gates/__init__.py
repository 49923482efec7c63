"""Legs, controls and the RL loop of a case: from prompts to evidence and a report page."""
