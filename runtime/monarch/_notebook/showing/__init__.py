"""What a cell shows: values, figures and printed text."""
