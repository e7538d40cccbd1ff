/*
 * pickle_opcodes.c - bounds the memory that a pickle takes, before it is unpickled.
 *
 * Python's unpickler in C keeps its memo in an array: a pickle of nine bytes with memo index 0xffffffff makes it take 64 GiB.
 */
#include "module.h"

#include <stdint.h>
#include <string.h>

/* The layout of an opcode's argument: that many bytes; or a count of 1, 4 or 8 bytes, followed by that many bytes; or lines. */
enum { COUNTED_1 = 16, COUNTED_4, COUNTED_8, LINE, LINES, UNKNOWN };

static int argument_of(uint8_t opcode)
{
        switch (opcode) {
        case '(': case '.': case '0': case '1': case '2': case ')': case ']': case '}': case 'a': case 'b': case 'd': case 'e': case 'l':
        case 'o': case 'Q': case 'R': case 's': case 't': case 'u': case 'N': case 0x81: case 0x85: case 0x86: case 0x87: case 0x88:
        case 0x89: case 0x8f: case 0x90: case 0x91: case 0x92: case 0x93: case 0x94: case 0x97: case 0x98:
                return 0;
        case 'K': case 'h': case 'q': case 0x80: case 0x82:
                return 1;
        case 'M': case 0x83:
                return 2;
        case 'J': case 'j': case 'r': case 0x84:
                return 4;
        case 'G': case 0x95:
                return 8;
        case 'U': case 'C': case 0x8a: case 0x8c:
                return COUNTED_1;
        case 'T': case 'X': case 'B': case 0x8b:
                return COUNTED_4;
        case 0x8d: case 0x8e: case 0x96:
                return COUNTED_8;
        case 'I': case 'L': case 'F': case 'S': case 'V': case 'P': case 'g':
                return LINE;
        case 'c': case 'i':
                return LINES;
        default: /* also 'p', a memo index in digits: no current writer uses it */
                return UNKNOWN;
        }
}

static uint64_t little_endian(const uint8_t *at, size_t size)
{
        uint64_t value = 0;

        while (size--)
                value = value << 8 | at[size];
        return value;
}

/* The place after `lines` lines; NULL: there are fewer. */
static const uint8_t *skip_lines(const uint8_t *at, const uint8_t *end, int lines)
{
        while (at && lines--) {
                at = memchr(at, '\n', (size_t)(end - at));
                at = at ? at + 1 : NULL;
        }
        return at;
}

/* The place after the argument at `at`. NULL: the argument is cut off, or its memo index is larger than the pickle's size. */
static const uint8_t *skip_argument(uint8_t opcode, const uint8_t *at, const uint8_t *end, size_t pickle_size)
{
        int argument = argument_of(opcode);
        size_t head = argument < COUNTED_1 ? (size_t)argument : argument == COUNTED_1 ? 1 : argument == COUNTED_4 ? 4 : 8;
        uint64_t value;

        if (argument == UNKNOWN)
                return NULL;
        if (argument >= LINE)
                return skip_lines(at, end, argument == LINES ? 2 : 1);
        if ((size_t)(end - at) < head)
                return NULL;
        value = little_endian(at, head);
        at += head;
        if (argument < COUNTED_1)
                return opcode == 'r' && value > pickle_size ? NULL : at;
        return value > (size_t)(end - at) ? NULL : at + value;
}

/* Whether torch's own unpickler for untrusted files accepts it (torch/_weights_only_unpickler.py). */
static bool is_torchs(uint8_t opcode)
{
        switch (opcode) {
        case '(': case '.': case ')': case ']': case '}': case 'a': case 'b': case 'c': case 'e': case 'h': case 'j': case 'q': case 'r':
        case 's': case 't': case 'u': case 'G': case 'J': case 'K': case 'M': case 'N': case 'Q': case 'R': case 'U': case 'X':
        case 0x80: case 0x81: case 0x85: case 0x86: case 0x87: case 0x88: case 0x89: case 0x8a: case 0x8f:
                return true;
        default:
                return false;
        }
}

static PyObject *look_through(PyObject *pickle, bool (*allows)(uint8_t))
{
        const uint8_t *at, *end;
        Py_ssize_t size;
        char *data;

        if (PyBytes_AsStringAndSize(pickle, &data, &size) < 0)
                return NULL;
        at = (const uint8_t *)data;
        end = at + size;
        while (at && at < end && *at != '.')
                at = !allows || allows(*at) ? skip_argument(*at, at + 1, end, (size_t)size) : NULL;
        return PyBool_FromLong(at && at < end);
}

PyObject *pickle_is_modest(PyObject *module, PyObject *pickle)
{
        return look_through(pickle, NULL);
}

PyObject *pickle_is_torchs(PyObject *module, PyObject *pickle)
{
        return look_through(pickle, is_torchs);
}
