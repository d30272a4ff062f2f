"""Bundle to assets for iPhone apps."""
