#include "store/cloud.h"

#include "store/adls/adls.h"
#include "store/azure/azure.h"
#include "store/gs/gs.h"
#include "store/notice.h"
#include "store/s3/s3.h"
#include "store/several/several.h"

void cloud_offer(void)
{
        store_offer(&store_several, store_several_takes); /* before those whose schemes it shares */
        store_offer(&store_azure, store_azure_takes);
        store_offer(&store_adls, store_adls_takes);
        store_offer(&store_s3, store_s3_takes);
        store_offer(&store_gs, store_gs_takes);
        notice_offer(metadata_ask);
}
