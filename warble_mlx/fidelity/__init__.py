"""What storing a model in fewer bits costs, measured on token streams that it generates itself."""
