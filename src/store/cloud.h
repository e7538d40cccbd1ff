/*
 * cloud.h - the drivers of stores that are reached over a network, in a library of their own: a program that links it calls cloud_offer
 * once, before threads start. Then store_open opens their URLs, and notice_get asks the metadata services of clouds.
 */
#ifndef NB_STORE_CLOUD_H
#define NB_STORE_CLOUD_H

void cloud_offer(void);

#endif
