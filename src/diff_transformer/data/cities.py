"""Cities for needles: single words of at most nine letters, all distinct, none contained in another."""

_NAMES = """
Aarhus Accra Adelaide Agadir Aleppo Algiers Almaty Amman Amsterdam Ankara Antwerp Asmara Aswan Athens Auckland
Baghdad Baku Bamako Bangkok Banjul Barcelona Basel Beirut Belfast Belgrade Bergen Berlin Bern Bilbao Bogota Bologna
Bonn Bordeaux Boston Brasilia Bremen Brisbane Brussels Bucharest Budapest Bursa Busan Cairo Calgary Canberra Caracas
Cardiff Cebu Chengdu Chennai Chicago Cologne Colombo Cork Cusco Dakar Dalian Dallas Damascus Darwin Davao Delft
Delhi Denver Detroit Dhaka Dijon Djibouti Doha Dresden Dubai Dublin Dundee Durban Edinburgh Edmonton Erfurt Faro
Florence Frankfurt Fukuoka Galway Gdansk Geneva Genoa Ghent Glasgow Granada Graz Guangzhou Haifa Hamburg Hanoi
Harare Havana Helsinki Hiroshima Hobart Honolulu Houston Hyderabad Innsbruck Istanbul Izmir Jaipur Jakarta Jeddah
Jerusalem Kabul Kampala Kano Karachi Kathmandu Kazan Khartoum Kigali Kingston Kinshasa Kobe Kolkata Krakow Kyoto
Lagos Lahore Leeds Leipzig Leuven Liege Lille Lima Limerick Linz Lisbon Liverpool Ljubljana London Luanda Lusaka
Luxor Lyon Madrid Malaga Malmo Managua Manila Maputo Marrakesh Marseille Medellin Melbourne Memphis Miami Milan
Minsk Mombasa Monrovia Montreal Moscow Mumbai Munich Muscat Nagoya Nairobi Nanjing Nantes Naples Nashville Nicosia
Odessa Omaha Oran Osaka Oslo Ottawa Oulu Padua Palermo Paris Perth Phoenix Pisa Portland Porto Prague Pretoria Pune
Quito Rabat Riga Riyadh Rome Rotterdam Salvador Santiago Santos Sapporo Sarajevo Seattle Sendai Seoul Seville
Shanghai Singapore Skopje Sofia Stockholm Stuttgart Suva Sydney Taipei Tallinn Tampa Tampere Tashkent Tbilisi Tehran
Tirana Tokyo Toronto Toulouse Trieste Tripoli Tulsa Tunis Turin Turku Uppsala Utrecht Vaduz Valencia Valletta
Vancouver Varna Venice Verona Vienna Vigo Vilnius Warsaw Wuhan Xian Yerevan Yokohama York Zagreb Zanzibar Zurich
"""
CITIES: tuple[str, ...] = tuple(_NAMES.split())
