/*
 * Read the value of --sres-env: the protocol's number, ';', and NAME=VALUE pairs joined by ';', names and values percent-encoded
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

/*
 * The pairs behind the protocol's number, which goes to *protocol. A value of a release that had no number gives
 * 0, and all of the text.
 */
const char *env_option_pairs(const char *text, unsigned *protocol);

/* True when the whole of text (pairs) can be decoded. */
bool env_option_valid(const char *text);

#endif
