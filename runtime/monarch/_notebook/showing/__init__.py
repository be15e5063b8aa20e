"""Output of a cell on a rank: values, figures and printed text."""
