"""Pictures of a model: its blocks, attention maps, experts' use. Imports predict and report's charts and pages."""
