"""Predictors: where rows should lie, and how fast a machine that cannot be had would train.

This package imports holdfast, which knows of it by its entry point alone."""
