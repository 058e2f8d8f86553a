"""Decompositions of a given table: truncated factors, TT-SVD, TR-SVD with alternating least squares."""
