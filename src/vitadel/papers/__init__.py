"""The tables and figures of the five papers as documents: rows, columns, published values, evaluations, claims."""
