#include "store/notice.h"

#include "base/error.h"

static notice_ask *offered;

void notice_offer(notice_ask *ask)
{
        offered = ask;
}

enum nebula_status notice_get(enum nebula_cloud cloud, char kept[NOTICE_KEPT_MAX], struct notice *ret_notice, struct nebula_error *error)
{
        if (!offered)
                return error_set(error, NEBULA_INVALID, 0, "this program asks no metadata service");
        return offered(cloud, kept, ret_notice, error);
}
