"""Lines of a configuration of LBNL Node Health Check (NHC), judged without a shell."""
