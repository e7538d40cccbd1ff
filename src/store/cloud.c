#include "store/cloud.h"

#include "store/azure/azure.h"

void cloud_offer(void)
{
        store_offer(&store_azure, store_azure_takes);
}
