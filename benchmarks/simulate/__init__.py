"""The real engine on a null model, in virtual time: many requests, every figure reproducible."""
