#include <stdlib.h>
#include <string.h>

#include "env_option.h"

static bool is_plain(char c)
{
	return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') ||
	       c == '_' || c == '.' || c == '-';
}

static int hex_digit(char c)
{
	if (c >= '0' && c <= '9')
		return c - '0';
	if (c >= 'A' && c <= 'F')
		return c - 'A' + 10;
	return -1;
}

/*
 * Decode *text in place up to the first byte that is not encoded (the separator), and leave *text at it.
 * Returns the end of the decoded part, NULL when an escape is malformed.
 */
static char *decode(char **text)
{
	char *in = *text, *out = *text;
	int high, low;

	for (;;) {
		if (is_plain(*in)) {
			*out++ = *in++;
			continue;
		}
		if (*in != '%')
			break;
		high = hex_digit(in[1]);
		low = high < 0 ? -1 : hex_digit(in[2]);
		/* %00 would end the string early; no environment can hold it. */
		if (low < 0 || (high == 0 && low == 0))
			return NULL;
		*out++ = (char)(high * 16 + low);
		in += 3;
	}
	*text = in;
	return out;
}

int env_option_next(char **cursor, char **name, char **value)
{
	char *in = *cursor, *end, separator;

	if (*in == '\0')
		return 0;

	*name = in;
	end = decode(&in);
	if (end == NULL || end == *name || *in != '=')
		return -1;
	*end = '\0';
	if (strchr(*name, '=') != NULL)
		return -1;

	*value = ++in;
	end = decode(&in);
	if (end == NULL || (*in != ';' && *in != '\0'))
		return -1;
	separator = *in;
	*end = '\0';
	if (separator == ';') {
		in++;
		/* A separator promises another pair. */
		if (*in == '\0')
			return -1;
	}
	*cursor = in;
	return 1;
}

const char *env_option_pairs(const char *text, unsigned *protocol)
{
	const char *in = text;
	unsigned number = 0;

	while (*in >= '0' && *in <= '9' && in - text < 6)
		number = number * 10 + (unsigned)(*in++ - '0');
	*protocol = in > text && *in == ';' ? number : 0;
	return *protocol != 0 ? in + 1 : text;
}

bool env_option_valid(const char *text)
{
	char *copy = strdup(text), *cursor = copy, *name, *value;
	int more = -1;

	if (copy == NULL)
		return false;
	while ((more = env_option_next(&cursor, &name, &value)) > 0)
		;
	free(copy);
	return more == 0;
}
