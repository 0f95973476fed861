"""Proofs of contraction: what holds for every input in a domain and every reachable state."""

from rnnaudit.certificates.interface import Certificate, CertificateSet, Domain, Norm

__all__ = ["Certificate", "CertificateSet", "Domain", "Norm"]
