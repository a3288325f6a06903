/*
 * Read the value of --sres-env: NAME=VALUE pairs joined by ';', names and values percent-encoded
 * (everything but A-Za-z0-9_.- is %XX). The encoder is slurm_resilience/resume/srun/env_option.py.
 */
#ifndef SRES_ENV_OPTION_H
#define SRES_ENV_OPTION_H

#include <stdbool.h>

/*
 * Take the next pair from *cursor, decoding it in place. Returns 1 with name and value set, 0 at the
 * end, -1 when the text is malformed.
 */
int env_option_next(char **cursor, char **name, char **value);

/* True when the whole of text can be decoded. */
bool env_option_valid(const char *text);

#endif
