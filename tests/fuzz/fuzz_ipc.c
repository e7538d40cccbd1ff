/*
 * The bytes that a peer sends, as both ends read them: ipc_receive, ipc_receive_request, ipc_inbox_fill,
 * ipc_request_check and ipc_answer_check. A table of system calls feeds them: its `receive` reads the
 * fuzzer's input a few bytes at a time, and passes a descriptor where the input asks for one.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/ipc.h"
#include "os/os.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define PASSED_FD 1000000 /* never open */

static const uint8_t *input;
static size_t input_left;
static int open_count;

static int64_t receive_input(int fd, void *data, size_t size, int *ret_passed_fd)
{
        size_t step = input_left > 0 ? input[0] % 61u + 1 : 0;

        if (fd < 0)
                abort(); /* a request that is whole is not waited for */
        size = size < step ? size : step;
        size = size < input_left ? size : input_left;
        *ret_passed_fd = -1;
        if (size == 0)
                return 0;
        if (input[0] == 0xfd) {
                *ret_passed_fd = PASSED_FD;
                open_count++;
        }
        memcpy(data, input, size);
        input += size;
        input_left -= size;
        return (int64_t)size;
}

static int close_passed(int fd)
{
        if (fd != PASSED_FD || open_count == 0)
                abort();
        open_count--;
        return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
        struct os_table table = os_linux;
        struct ipc_inbox inbox = { 0 };
        struct ipc_frame frame = { 0 };
        struct nebula_error error;
        bool is_broken;

        table.receive = receive_input;
        table.close = close_passed;
        os = &table;
        input = data;
        input_left = size;
        while (ipc_receive(0, &frame, &error) == NEBULA_OK) {
                if (ipc_request_check(&frame, &error) == NEBULA_OK &&
                    frame.header.size != ipc_request_size((enum ipc_type)frame.header.type))
                        abort();
                for (enum ipc_type type = IPC_HELLO; type <= IPC_TYPE_LAST; type++)
                        ipc_answer_check(&frame, type, &is_broken, &error);
        }
        ipc_frame_done(&frame);
        input = data;
        input_left = size;
        while (ipc_receive_request(0, &inbox, &frame, &error) == NEBULA_OK)
                if (frame.fd >= 0 || inbox.count > sizeof inbox.data)
                        abort();
        ipc_frame_done(&frame);
        input = data;
        input_left = size;
        inbox = (struct ipc_inbox){ 0 };
        while (ipc_inbox_held(&inbox) == IPC_HELD_WHOLE ? ipc_receive_request(-1, &inbox, &frame, &error) == NEBULA_OK :
               ipc_inbox_held(&inbox) == IPC_HELD_PART && ipc_inbox_fill(0, &inbox, &error) == NEBULA_OK)
                if (inbox.start + inbox.count > sizeof inbox.data)
                        abort();
        ipc_frame_done(&frame);
        if (open_count != 0)
                abort(); /* a descriptor leaked */
        os = &os_linux;
        return 0;
}
