/*
 * The supervisor's variables in one option value: NAME=VALUE pairs joined by ';', names and values
 * percent-encoded (everything but A-Za-z0-9_.- is %XX). The encoder is slurm_resilience/resume/carrier.py.
 */
#ifndef SRES_CARRIER_H
#define SRES_CARRIER_H

#include <stdbool.h>

/*
 * Take the next pair from *cursor, decoding it in place. Returns 1 with name and value set, 0 at the
 * end, -1 when the carrier is malformed.
 */
int carrier_next(char **cursor, char **name, char **value);

/* Can the whole of it be decoded? */
bool carrier_valid(const char *carrier);

#endif
