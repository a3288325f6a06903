/* Ask Slurm what the supervisor will want to know, before it is there. */
#ifndef SRES_EARLY_QUESTIONS_H
#define SRES_EARLY_QUESTIONS_H

/*
 * Start Slurm's commands beside this srun, and tell the program that this process becomes of them, in the
 * environment: its answers come while it is loaded. What cannot be started is left out, and asked later.
 */
void early_questions_start(const char *srun);

/* Keep the commands' outputs open over execv. */
void early_questions_keep(void);

#endif
