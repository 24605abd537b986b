"""What the families of models share."""
