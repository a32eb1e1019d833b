"""Rows on an accelerator: slots of its memory that hold the rows of coming steps."""
